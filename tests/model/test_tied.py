"""Tied weights: one parameter under two names, in two models, in two optimizers."""

import copy

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from tests.model.cases import EPS, SCALE, close, prepare
from tests.model.nets import Tied
from tests.support import loops


def train_tied(model, optimizer, *, scaled=True):
    ids, targets = torch.tensor([[0, 3, 3, 4], [1, 4, 4, 0]])
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).float(), targets)
        loops.scaled_backward(loss, optimizer) if scaled else loss.backward()
        optimizer.step()


def test_a_tied_weight_trains_saves_copies_and_is_restored_as_one(level):
    plain = Tied()
    model, optimizer = prepare(level, copy.deepcopy(plain))
    with amp.disable_casts():
        train_tied(plain, loops.sgd(plain.parameters()), scaled=False)
    train_tied(model, optimizer)
    assert len(list(amp.master_params(optimizer))) == 1
    assert close(amp.master_params(optimizer), plain.parameters(), eps=EPS[level])
    expected = loops.masters(optimizer)
    state = model.state_dict()
    assert list(state) == ["embed.weight", "head.weight"]
    assert torch.equal(state["embed.weight"], state["head.weight"])
    state = copy.deepcopy(state)
    twin, other = copy.deepcopy((model, optimizer))
    assert twin.head.weight is twin.embed.weight is other.param_groups[0]["params"][0]
    train_tied(model, optimizer)
    model.load_state_dict(state)
    assert loops.same(expected, loops.masters(optimizer))
    amp.restore(model, optimizer)
    assert model.head.weight is model.embed.weight is optimizer.param_groups[0]["params"][0]


def tied_pair():
    first, second = loops.net(0), loops.net(1)
    second[0].weight = first[0].weight
    return first, second


def joint_step(models, optimizers, x, y, *, scaled):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = sum(loops.loss_of(model, x, y) for model in models)
    loops.scaled_backward(loss, optimizers) if scaled else loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def steps_in_turn(models, optimizers, x, y, *, scaled):
    for model, optimizer in zip(models, optimizers, strict=True):
        joint_step([model], [optimizer], x, y, scaled=scaled)


def of_all(models):
    return [loops.sgd(list(dict.fromkeys(p for model in models for p in model.parameters())))]


def of_each(models):
    return [loops.sgd(model.parameters()) for model in models]


STEPS = [(of_all, joint_step), (of_each, joint_step), (of_each, steps_in_turn)]


@pytest.mark.parametrize(("make", "step"), STEPS)
def test_two_models_that_share_a_weight_train_as_in_fp32(level, make, step):
    found = []
    for scaled in (False, True):
        models = tied_pair()
        optimizers = make(models)
        if scaled:
            options = {"opt_level": level, "loss_scale": SCALE.get(level), "verbosity": 0}
            amp.initialize(models, optimizers, **options)
        for x, y in loops.batches(3):
            step(models, optimizers, x, y, scaled=scaled)
        assert models[0][0].weight is models[1][0].weight
        found.append([param for each in optimizers for param in amp.master_params(each)])
    assert close(found[1], found[0], eps=EPS[level])
