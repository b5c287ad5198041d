"""Ctrl-C at any line of a converted model's own code: nothing is left behind."""

import sys
from pathlib import Path

import pytest
import torch

from apex._engine import model as conversion
from tests._engine.conversion_cases import LOW, O3, Net, PlainRegion, converted, x
from tests._engine.test_convert_state_dict import hooks_of

FOLDER = str(Path(conversion.__file__).parent)


class Masters:
    """One exact value for each parameter; a ``state_dict`` call must bring them to the model."""

    def __init__(self, model):
        self.by_id = {
            id(p): p.detach().float() * (1 + 2.0**-12) for p in model.parameters() if p.dtype is LOW
        }

    def master_of(self, param):
        return self.by_id.get(id(param))

    def masters_of(self, params):
        return [self.master_of(param) for param in params]

    def set_exact(self, values):
        for param, value in values:
            self.by_id[id(param)] = value

    def write_back(self):
        pass


def interrupt_at(line, act):
    """Runs ``act`` and raises KeyboardInterrupt at the n-th line of the folder; returns whether."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def every_interrupt(act):
    line = 1
    while interrupt_at(line, act):
        yield line
        line += 1
    assert line > 5


def prepared():
    model = converted(Net(), conversion.ModelPlan(LOW, LOW, torch.float32, fp32_modules=("norm",)))
    model._apex_state.link._masters = Masters(model)
    return model.eval()


def test_in_the_forward():
    model = prepared()
    expected, keys, hooks = model(x()), set(vars(model)), hooks_of(model)
    for _ in every_interrupt(lambda: model(x())):
        assert set(vars(model)) == keys
        assert hooks_of(model) == hooks
        assert torch.equal(model(x()), expected)


@pytest.mark.parametrize("part", ["", "last"])
def test_in_state_dict(part):
    model = prepared()
    module = model.get_submodule(part)
    expected = module.state_dict()
    for _ in every_interrupt(module.state_dict):
        state = module.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_in_load_state_dict():
    model = prepared()
    new = {name: torch.rand_like(value.float()) for name, value in model.state_dict().items()}
    old = model.state_dict()
    new["count"] = new["norm.num_batches_tracked"] = torch.tensor(3)
    for _ in every_interrupt(lambda: model.load_state_dict(new)):
        model.load_state_dict(old)
        state = model.state_dict()
        assert all(torch.equal(state[name].to(value), value) for name, value in old.items())


def test_in_a_conversion_that_is_withdrawn():
    for line in every_interrupt(lambda: conversion.convert(Net(), O3, PlainRegion())):
        model = Net()
        assert interrupt_at(line, lambda model=model: conversion.convert(model, O3, PlainRegion()))
        conversion.undo_convert(model)
        assert type(model) is Net
        assert set(vars(model)) == set(vars(Net()))
        assert hooks_of(model) == []
