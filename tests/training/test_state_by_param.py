"""Scripts look up ``optimizer.state`` by the model's parameters, also where masters are stepped."""

import copy
import io
from collections import defaultdict

import pytest
import torch

from apex import amp
from tests.training import cases

KINDS = [("O2", True), ("O5", True), ("O5", "split")]


def prepared(level, kind, make=cases.sgd):
    return cases.prepared(level, make, master_weights=kind)


def trained(level, kind, make=cases.sgd):
    model, optimizer = prepared(level, kind, make)
    cases.train_step(model, optimizer, *cases.batch())
    return model, optimizer


def sides(model, optimizer):
    return zip(model.parameters(), amp.master_params(optimizer), strict=True)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("level", "kind"), KINDS)
def test_state_is_found_by_the_models_parameters(level, kind):
    model, optimizer = trained(level, kind, momentum)
    for param, master in sides(model, optimizer):
        assert param in optimizer.state
        assert optimizer.state[param] is optimizer.state[master]
        assert optimizer.state.get(param) is optimizer.state[master]
    assert len(optimizer.state) == len(list(model.parameters()))
    optimizer.state_dict()


@pytest.mark.parametrize(("level", "kind"), KINDS)
def test_state_that_is_read_before_the_first_step_is_that_of_the_master(level, kind):
    model, optimizer = prepared(level, kind, momentum)
    for param, master in sides(model, optimizer):
        assert param not in optimizer.state
        assert optimizer.state.get(param, 1) == 1
        assert optimizer.state.pop(param, 2) == 2
        assert "momentum_buffer" not in optimizer.state[param]
        assert optimizer.state[param] is optimizer.state[master]
    cases.train_step(model, optimizer, *cases.batch())
    assert all("momentum_buffer" in optimizer.state[param] for param in model.parameters())
    optimizer.state_dict()


@pytest.mark.parametrize("reset", ["load_state_dict", "new"])
@pytest.mark.parametrize(("level", "kind"), KINDS)
def test_state_that_a_script_replaces_is_found_again(level, kind, reset):
    model, optimizer = trained(level, kind, momentum)
    if reset == "new":
        optimizer.state = defaultdict(dict)
    else:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    cases.train_step(model, optimizer, *cases.batch())
    for param, master in sides(model, optimizer):
        assert optimizer.state[param] is optimizer.state[master]


def train(level, kind, params_of, change, steps=6):
    model, optimizer = prepared(level, kind, momentum)
    for _ in range(steps):
        cases.train_step(model, optimizer, *cases.batch())
        for param in params_of(model, optimizer):
            change(optimizer.state, param)
    return cases.masters(optimizer)


def mask(state, param):  # as sparse momentum does: Dettmers and Zettlemoyer, 2019
    if "momentum_buffer" in state[param]:
        state[param]["momentum_buffer"].mul_(0.5)


def drop(state, param):
    state.pop(param, None)


@pytest.mark.parametrize("change", [mask, drop])
@pytest.mark.parametrize(("level", "kind"), KINDS)
def test_state_is_changed_by_the_models_parameters(level, kind, change):
    by_model = train(level, kind, lambda model, _: model.parameters(), change)
    by_master = train(level, kind, lambda _, optimizer: amp.master_params(optimizer), change)
    assert cases.same(by_model, by_master)


def test_other_keys_are_those_of_any_state():
    _, optimizer = trained("O5", True, momentum)
    assert optimizer.state["total"] == {}
    assert optimizer.state[torch.zeros(1)] == {}
    with pytest.raises(KeyError):
        optimizer.state.pop("missing")


def test_copies_files_and_restored_optimizers_have_a_plain_state():
    model, optimizer = trained("O5", True, momentum)
    assert type(copy.deepcopy(optimizer.state)) is defaultdict
    file = io.BytesIO()
    torch.save(optimizer, file)
    assert b"MasterState" not in file.getvalue()
    amp.restore(model, optimizer)
    assert type(optimizer.state) is defaultdict
    assert all("momentum_buffer" in optimizer.state[param] for param in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_who_holds_the_state_has_it_again_after_restore(level):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = optimizer.state
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    amp.restore(model, optimizer)
    assert optimizer.state is held
    assert set(held) == set(model.parameters())
