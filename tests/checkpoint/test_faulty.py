"""What a checkpoint that is cut short, or of another model, leaves behind: nothing half done."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases


def adam(params):
    return torch.optim.Adam(params, lr=1e-2, eps=1e-4)


def trained(level, **options):
    model, optimizer = cases.prepared(level, adam, **options)
    cases.train_step(model, optimizer, *cases.batch())
    return model, optimizer


def held(model, optimizer):
    return {
        "weights": cases.values(model.parameters()),
        "masters": cases.masters(optimizer),
        "groups": copy.deepcopy(optimizer.state_dict()["param_groups"]),
        "state": copy.deepcopy(optimizer.state_dict()["state"]),
        "scales": dict(amp.state_dict()),
    }


def agree(model, optimizer):
    """Whether every weight is its master, rounded."""
    pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
    return all(torch.equal(param, master.to(param.dtype)) for param, master in pairs)


class Other(nn.Sequential):
    """The names of ``cases.net()``; the second layer is wider."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_weights_of_another_model_are_refused_by_name_and_masters_follow_what_fits(level):
    model, optimizer = trained(level)
    before = held(model, optimizer)
    state = Other().state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.weight"):
        model.load_state_dict(state)
    assert agree(model, optimizer)
    # torch loads what fits before it raises; the rest, and all else, is as it was.
    masters = cases.masters(optimizer)
    assert torch.equal(masters[0], state["0.weight"].to(masters[0].dtype))
    assert cases.same(masters[2:], before["masters"][2:])
    assert cases.same(cases.values(model.parameters())[2:], before["weights"][2:])
    assert cases.same(optimizer.state_dict()["state"], before["state"])
    cases.train_step(model, optimizer, *cases.batch())
    assert agree(model, optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_weights_cut_short_are_refused_by_name_and_masters_follow_what_fits(level):
    model, optimizer = trained(level)
    before = held(model, optimizer)
    state = cases.net(seed=3).state_dict()
    del state["2.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"2\.bias"'):
        model.load_state_dict(state)
    assert agree(model, optimizer)
    assert torch.equal(cases.masters(optimizer)[3], before["masters"][3])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_state_of_another_model_is_refused_and_changes_nothing(level):
    model, optimizer = trained(level)
    before = held(model, optimizer)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(torch.optim.Adam(other.parameters()).state_dict())
    assert cases.same(held(model, optimizer), before)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_state_cut_short_is_refused_by_name_and_changes_nothing(level):
    model, optimizer = trained(level)
    before = held(model, optimizer)
    with pytest.raises(KeyError, match="state"):
        optimizer.load_state_dict({"param_groups": optimizer.state_dict()["param_groups"]})
    assert cases.same(held(model, optimizer), before)
