"""What a checkpoint that is cut short, or of another model, leaves behind: nothing half done."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops


def adam(params):
    return torch.optim.Adam(params, lr=1e-2, eps=1e-4)


def held(model, optimizer):
    return {
        "weights": loops.values(model.parameters()),
        "masters": loops.masters(optimizer),
        "groups": copy.deepcopy(optimizer.state_dict()["param_groups"]),
        "state": copy.deepcopy(optimizer.state_dict()["state"]),
        "scales": dict(amp.state_dict()),
    }


@pytest.mark.parametrize("cut", [False, True])
def test_weights_of_another_model_or_cut_short_are_refused_and_masters_follow_what_fits(level, cut):
    model, optimizer = loops.trained(level, adam, steps=1)
    before = held(model, optimizer)
    state = loops.net(seed=3).state_dict()
    if not cut:
        state = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict()
    else:
        del state["2.weight"], state["2.bias"]
    words = r"Missing key\(s\).*\"2\.weight\"" if cut else r"size mismatch for 2\.weight"
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(state)
    # torch loads what fits before it raises; the rest, and all else, is as it was.
    masters = loops.masters(optimizer)
    assert torch.equal(masters[0], state["0.weight"])
    after = held(model, optimizer)
    for name in ("masters", "weights"):
        assert loops.same(after[name][2:], before[name][2:])
    assert loops.same(after["state"], before["state"])
    for _ in range(2):
        assert loops.agree(model, optimizer)
        loops.train_step(model, optimizer, *loops.batch())


@pytest.mark.parametrize("cut", [False, True])
def test_an_optimizer_state_of_another_model_or_cut_short_changes_nothing(level, cut):
    model, optimizer = loops.trained(level, adam, steps=1)
    before = held(model, optimizer)
    state = adam(nn.Linear(2, 2).parameters()).state_dict()
    words = "doesn't match the size of optimizer's group"
    if cut:
        state, words = {"param_groups": optimizer.state_dict()["param_groups"]}, "state"
    with pytest.raises((KeyError, ValueError), match=words):
        optimizer.load_state_dict(state)
    assert loops.same(held(model, optimizer), before)
