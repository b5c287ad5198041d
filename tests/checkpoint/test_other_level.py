"""A checkpoint goes on at another level, with amp off, or with other losses, as far as it can."""

import copy
import functools
import itertools
import warnings

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedSGD
from tests.support import loops

OFF = "off"
OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
level = loops.at_levels(*loops.WITH_MASTERS)
PAIRS = list(itertools.permutations((*loops.LEVELS_SHORT, OFF), 2))


def prepare(level, model, optimizer, **options):
    options = {"verbosity": 0, **options}
    if level == OFF:
        return amp.initialize(model, optimizer, enabled=False)
    return amp.initialize(model, optimizer, opt_level=level, **options)


def save_at(level, name):
    model = loops.net()
    model, optimizer = prepare(level, model, OPTIMIZERS[name](model.parameters()))
    overflows = {1} if level in loops.DYNAMIC else ()
    loops.train(model, optimizer, data=loops.batches(3, overflows))
    return [part.state_dict() for part in (model, optimizer, amp)]


@pytest.fixture(scope="module")
def saved():
    """Returns what a level saved with an optimizer."""
    return functools.cache(save_at)


def resume_at(level, name, states, *, load_first):
    model = loops.net(seed=5)
    optimizer = OPTIMIZERS[name](model.parameters())
    if not load_first:
        prepare(level, model, optimizer)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    if load_first:
        prepare(level, model, optimizer)
    if states[2]:  # empty of a run without amp: nothing to load
        amp.load_state_dict(states[2])
    return model, optimizer


@pytest.mark.parametrize(("before", "now"), PAIRS)
def test_weights_state_and_scale_go_on_in_the_dtypes_of_the_level(saved, before, now):
    name = "SGD" if before < now else "fused AdamW"
    model_state, optimizer_state, scales = states = saved(before, name)
    model, optimizer = resume_at(now, name, states, load_first=before < now)
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    assert {p.dtype for p in stepped} == {torch.float32}
    assert loops.same(list(model_state.values()), loops.values(stepped))
    for param, value in zip(model.parameters(), model_state.values(), strict=True):
        assert torch.equal(param, value.to(param.dtype))
    assert loops.same(optimizer.state_dict()["state"], optimizer_state["state"])
    if OFF not in (before, now):
        same_kind = (before in loops.DYNAMIC) is (now in loops.DYNAMIC)
        fresh = 2.0**16 if now in loops.DYNAMIC else 1.0
        assert loops.loss_scale() == (scales["loss_scaler0"]["loss_scale"] if same_kind else fresh)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loops.train(model, optimizer, 2, seed=3)
    end = loops.values(model.parameters())
    assert all(value.isfinite().all() for value in end)
    assert not loops.same(list(model_state.values()), end)


def test_there_and_back_by_a_level_with_masters_loses_nothing(saved):
    states = saved("O1", "fused AdamW")
    for level in ("O5", "O2", OFF, "O4"):
        model, optimizer = resume_at(level, "fused AdamW", states, load_first=False)
        states = [model.state_dict(), optimizer.state_dict(), {}]
        del model, optimizer
    first = saved("O1", "fused AdamW")
    assert loops.same(dict(first[0]), dict(states[0]))
    assert loops.same(first[1]["state"], states[1]["state"])


def test_a_frozen_weight_that_has_state_gets_an_exact_master(level):
    model = loops.net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.Adagrad(model.parameters())  # makes all state at once
    exact = loops.values(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert loops.same(exact, loops.values(optimizer.param_groups[0]["params"]))


def test_weights_unfrozen_after_a_load_go_on_bit_for_bit(level):
    states = save_at(level, "SGD")
    ends = []
    for frozen in (False, True):
        model = loops.net(seed=5)
        model[0].requires_grad_(not frozen)
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        prepare(level, model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(states[1]))  # first, as the page on resuming says
        model.load_state_dict(states[0])
        amp.load_state_dict(states[2])
        model[0].requires_grad_(True)
        loops.train(model, optimizer, 2, seed=3)
        ends.append(dict(model.state_dict()))
    assert loops.same(*ends)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedSGD])
def test_state_that_is_loaded_before_initialize_has_the_dtype_of_training(optimizer_class):
    def pair():
        model = loops.Body(lambda self, x: self.part(x) * self.factor, part=nn.Linear(4, 2))
        model.factor = nn.Parameter(torch.ones(()))
        return model, optimizer_class(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = amp.initialize(*pair(), opt_level="O3", verbosity=0)
    loops.train_step(model, optimizer, *loops.batch())
    again, loaded = pair()
    loaded.load_state_dict(optimizer.state_dict())
    amp.initialize(again, loaded, opt_level="O3", verbosity=0)
    assert loops.same(optimizer.state_dict()["state"], loaded.state_dict()["state"])


def test_only_state_in_the_parameters_dtype_follows_it():
    """Counts stay exact, and the scales of codes."""
    model = loops.Body(lambda self, x: self.part(x) * self.factor, part=nn.Linear(4, 2))
    model.factor = nn.Parameter(torch.ones(()))
    optimizer = loops.sgd(model.parameters())
    average, count = torch.full((2, 4), 0.1), torch.tensor(4097.0)
    others = {"count": count, "sum": average.double(), "order": torch.tensor([1, 0])}
    codes = {"codes": torch.ones(2, dtype=torch.uint8), "scale": torch.full((1,), 0.1)}
    optimizer.state[model.part.weight] = {"average": average, **others}
    optimizer.state[model.part.bias] = dict(codes)
    optimizer.state[model.factor] = {"step": count}
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert loops.same(optimizer.state[model.part.weight], {"average": average.half(), **others})
    assert loops.same(optimizer.state[model.part.bias], codes)
    assert loops.same(optimizer.state[model.factor], {"step": count})
