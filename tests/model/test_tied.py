"""Tied weights: one parameter under two names, in two models, in two optimizers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.model.cases import EPS, SCALE, close
from tests.support import loops
from tests.support.loops import LEVELS_SHORT

every_level = pytest.mark.parametrize("level", LEVELS_SHORT)
TOKENS = torch.tensor([0, 3, 3, 5])


class Tied(nn.Module):
    """A language model of one word: the decoder's weight is the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.decode = nn.Linear(4, 7, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, tokens):
        return self.decode(self.embed(tokens))


def initialized(level, models, optimizers):
    return amp.initialize(
        models, optimizers, opt_level=level, verbosity=0, loss_scale=SCALE.get(level)
    )


def train(model, optimizer, *, scaled=True):
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(TOKENS).float(), (TOKENS + 1) % 7)
        if scaled:
            loops.scaled_backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()


@every_level
def test_a_tied_weight_trains_saves_copies_and_is_restored_as_one(level):
    plain = Tied()
    train(plain, loops.sgd(plain.parameters()), scaled=False)
    model = Tied()
    optimizer = loops.sgd(model.parameters())
    initialized(level, model, optimizer)
    train(model, optimizer)
    assert len(list(amp.master_params(optimizer))) == 1
    assert close(amp.master_params(optimizer), plain.parameters(), eps=EPS[level])
    expected = loops.masters(optimizer)
    state = model.state_dict()
    assert list(state) == ["embed.weight", "decode.weight"]
    assert torch.equal(state["embed.weight"], state["decode.weight"])
    state = copy.deepcopy(state)
    twin, other = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), (twin, other)):
        train(*pair)
    assert twin.decode.weight is twin.embed.weight
    assert loops.same(loops.masters(optimizer), loops.masters(other))
    model.load_state_dict(state)
    assert loops.same(expected, loops.masters(optimizer))
    amp.restore(model, optimizer)
    assert model.decode.weight is model.embed.weight is optimizer.param_groups[0]["params"][0]


def tied_pair():
    first, second = loops.net(0), loops.net(1)
    second[0].weight = first[0].weight
    return first, second


def joint_step(models, optimizers, x, y, *, scaled):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = sum(loops.loss_of(model, x, y) for model in models)
    if scaled:
        loops.scaled_backward(loss, optimizers)
    else:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def steps_in_turn(models, optimizers, x, y, *, scaled):
    for model, optimizer in zip(models, optimizers, strict=True):
        joint_step([model], [optimizer], x, y, scaled=scaled)


def of_all(models):
    return [loops.sgd(list(dict.fromkeys(p for model in models for p in model.parameters())))]


def of_each(models):
    return [loops.sgd(model.parameters()) for model in models]


@pytest.mark.parametrize(
    ("make", "step"), [(of_all, joint_step), (of_each, joint_step), (of_each, steps_in_turn)]
)
@every_level
def test_two_models_that_share_a_weight_train_as_in_fp32(level, make, step):
    found = []
    for scaled in (False, True):
        models = tied_pair()
        optimizers = make(models)
        if scaled:
            initialized(level, models, optimizers)
        for x, y in loops.batches(3):
            step(models, optimizers, x, y, scaled=scaled)
        assert models[0][0].weight is models[1][0].weight
        found.append([param for each in optimizers for param in amp.master_params(each)])
    assert close(found[1], found[0], eps=EPS[level])
