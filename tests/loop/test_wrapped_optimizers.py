"""Objects around a prepared optimizer, as accelerate's, and methods wrapped on its class."""

import abc

import pytest
import torch

from apex import amp
from apex.integrations import scales
from tests.support import loops


class Accelerated(torch.optim.Optimizer):
    """An optimizer without its constructor around another, as ``accelerator.prepare`` returns."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Plain:
    """A wrapper that is no optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


def twice(optimizer):
    return Accelerated(Accelerated(optimizer))


@pytest.mark.parametrize("wrap", [Accelerated, Plain, twice])
@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_a_wrapped_optimizer_trains_and_skips_as_the_one_inside(level, wrap):
    pairs = [loops.prepared(level, loops.OPTIMIZERS["SGD"], loss_scale="dynamic") for _ in range(2)]
    for x, y in loops.batches(4, overflow_at={2}):
        loops.train_step(*pairs[0], x, y)
        loops.train_step(pairs[1][0], wrap(pairs[1][1]), x, y)
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in pairs))
    first, second = (scales.state_dict(optimizer) for _, optimizer in pairs)
    assert first == second


class Unconstructed(torch.optim.Optimizer):
    """An SGD that never calls torch's constructor, as timm's Lookahead of 2021."""

    def __init__(self, params):
        self.base = loops.sgd(params)
        self.param_groups, self.state, self.defaults = self.base.param_groups, {}, {}

    def step(self, closure=None):
        return self.base.step(closure)


class Abstract(abc.ABC, torch.optim.SGD):
    """Its first base has no attributes."""


def abstract(params):
    return Abstract(params, lr=0.1)


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_an_optimizer_without_torchs_constructor_or_abstract_first_trains(level):
    made = [loops.prepared(level, make) for make in (loops.sgd, Unconstructed, abstract)]
    for x, y in loops.batches(3):
        for model, optimizer in made:
            loops.train_step(model, optimizer, x, y)
    expected, *found = (loops.masters(optimizer) for _, optimizer in made)
    assert all(loops.same(masters, expected) for masters in found)
    amp.restore(*made[2])
    assert type(made[2][1]) is Abstract


class ClearsEverySecondTime(torch.optim.SGD):
    """As wrappers that accumulate the gradients of two passes."""

    calls = 0

    def zero_grad(self, set_to_none=True):
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)
        self.calls += 1


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_gradients_that_an_own_zero_grad_leaves_are_added_to(level):
    made = [
        loops.prepared(level, kind) for kind in (loops.sgd, lambda p: ClearsEverySecondTime(p, 0.1))
    ]
    (model, optimizer), own = made
    for x, y in loops.batches(4):
        for _ in range(2):
            own[1].zero_grad()
            loops.backward(*own, x, y)
            loops.backward(model, optimizer, x, y)
        for _, stepped in made:
            stepped.step()
        optimizer.zero_grad()
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in made))


@pytest.mark.parametrize("name", ["step", "zero_grad", "add_param_group"])
@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_a_method_wrapped_on_the_class_runs_once_inside_amps(level, name):
    classes = [type("SGD", (torch.optim.SGD,), {}) for _ in range(2)]
    made = [loops.prepared(level, own, loss_scale=128.0) for own in classes]
    cls = type(made[1][1])
    original, calls = getattr(cls, name), []

    def wrapper(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    setattr(cls, name, wrapper)
    for x, y in loops.batches(2):
        for model, optimizer in made:
            loops.train_step(model, optimizer, x, y)
    for _, optimizer in made:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert calls == [name] * (1 if name == "add_param_group" else 2)
    assert getattr(cls, name) is wrapper
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in made))


def test_accelerate_s_own_wrapper_is_looked_through():
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = loops.prepared("O4")
    model, wrapped = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    before = loops.masters(optimizer)
    loops.train_step(model, wrapped, *loops.batch())
    assert not loops.same(before, loops.masters(optimizer))
