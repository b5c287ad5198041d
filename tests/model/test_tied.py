"""Tied weights: one parameter under two names, in two models, in two optimizers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.model.cases import EPS, LEVELS, SCALE, close
from tests.support import training as cases

every_level = pytest.mark.parametrize("level", LEVELS)
TOKENS = torch.tensor([0, 3, 3, 5])


class Tied(nn.Module):
    """A language model of one word: the decoder's weight is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.decode = nn.Linear(4, 7, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, tokens):
        return self.decode(self.embed(tokens))


def tied(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tied()


def tied_pair():
    first, second = cases.net(0), cases.net(1)
    second[0].weight = first[0].weight
    return first, second


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def initialized(level, models, optimizers):
    return amp.initialize(
        models, optimizers, opt_level=level, verbosity=0, loss_scale=SCALE.get(level)
    )


def loss_of(model):
    return F.cross_entropy(model(TOKENS).float(), (TOKENS + 1) % 7)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def train_plain(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def trained(level):
    model = tied()
    optimizer = cases.sgd(model.parameters())
    initialized(level, model, optimizer)
    train(model, optimizer)
    return model, optimizer


@every_level
def test_a_tied_weight_trains_as_one(level):
    plain = tied()
    train_plain(plain, cases.sgd(plain.parameters()))
    model, optimizer = trained(level)
    assert model.decode.weight is model.embed.weight
    assert len(list(amp.master_params(optimizer))) == 1
    assert close(amp.master_params(optimizer), plain.parameters(), eps=EPS[level])


@every_level
def test_its_state_dict_has_both_names_sharing_memory_and_loads(level):
    model, optimizer = trained(level)
    state = model.state_dict()
    assert list(state) == ["embed.weight", "decode.weight"]
    assert state["embed.weight"].data_ptr() == state["decode.weight"].data_ptr()
    state = copy.deepcopy(state)
    expected = cases.masters(optimizer)
    train(model, optimizer)
    model.load_state_dict(state)
    assert model.decode.weight is model.embed.weight
    assert cases.same(expected, cases.masters(optimizer))


@every_level
def test_a_deep_copy_is_tied_and_trains_on_equally(level):
    original = trained(level)
    copied = copy.deepcopy(original)
    for pair in (original, copied):
        train(*pair)
    assert copied[0].decode.weight is copied[0].embed.weight
    assert cases.same(cases.masters(original[1]), cases.masters(copied[1]))


@every_level
def test_restore_leaves_it_tied(level):
    model, optimizer = amp.restore(*trained(level))
    assert model.decode.weight is model.embed.weight
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight


def joint_step(models, optimizers, x, y, *, scaled):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = sum(cases.loss_of(model, x, y) for model in models)
    if scaled:
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def steps_in_turn(models, optimizers, x, y, *, scaled):
    for model, optimizer in zip(models, optimizers, strict=True):
        joint_step([model], [optimizer], x, y, scaled=scaled)


def run(models, optimizers, step, *, scaled):
    for x, y in cases.batches(3):
        step(models, optimizers, x, y, scaled=scaled)


@every_level
def test_one_optimizer_of_two_tied_models(level):
    def one(models):
        params = dict.fromkeys(p for model in models for p in model.parameters())
        return cases.sgd(list(params))

    plain = tied_pair()
    reference = one(plain)
    run(plain, [reference], joint_step, scaled=False)
    models = tied_pair()
    optimizer = one(models)
    initialized(level, models, optimizer)
    run(models, [optimizer], joint_step, scaled=True)
    assert models[0][0].weight is models[1][0].weight
    assert close(amp.master_params(optimizer), amp.master_params(reference), eps=EPS[level])


@pytest.mark.parametrize("step", [joint_step, steps_in_turn])
@every_level
def test_two_optimizers_that_share_a_weight(level, step):
    plain = tied_pair()
    references = [cases.sgd(model.parameters()) for model in plain]
    run(plain, references, step, scaled=False)
    models = tied_pair()
    optimizers = [cases.sgd(model.parameters()) for model in models]
    initialized(level, models, optimizers)
    run(models, optimizers, step, scaled=True)
    for optimizer, reference in zip(optimizers, references, strict=True):
        assert close(amp.master_params(optimizer), amp.master_params(reference), eps=EPS[level])
