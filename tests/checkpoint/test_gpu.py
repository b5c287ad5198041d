"""Resuming on a CUDA device: scale, counter and flag live there."""

import copy

import pytest

from apex import amp
from tests.checkpoint import runs
from tests.training import cases

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def plain(name, seed):
    model = cases.net(seed).to(DEVICE)
    return model, runs.OPTIMIZERS[name](model.parameters())


def train(model, optimizer, name, steps):
    steps = [(x.to(DEVICE), y.to(DEVICE)) for x, y in steps]
    runs.train(model, optimizer, name, 2, steps)


@pytest.mark.parametrize("load_first", [True, False])
@pytest.mark.parametrize("name", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(level, name, load_first):
    model, optimizer = amp.initialize(*plain(name, seed=0), **runs.options(level, 2))
    train(model, optimizer, name, cases.batches(runs.FIRST, overflow_at={runs.FIRST - 1}))
    saved = copy.deepcopy(runs.states(model, optimizer))
    train(model, optimizer, name, cases.batches(runs.SECOND, seed=2))
    expected = runs.everything(model, optimizer)
    del model, optimizer

    model, optimizer = plain(name, seed=5)
    if not load_first:
        amp.initialize(model, optimizer, **runs.options(level, 2))
    for part, state in zip((model, optimizer, amp), saved, strict=True):
        part.load_state_dict(state)
    if load_first:
        amp.initialize(model, optimizer, **runs.options(level, 2))
    train(model, optimizer, name, cases.batches(runs.SECOND, seed=2))
    assert cases.same(expected, runs.everything(model, optimizer))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_checkpoint_moves_between_devices(level):
    model, optimizer = amp.initialize(*plain("Adam", seed=0), **runs.options(level, 2))
    train(model, optimizer, "Adam", cases.batches(2))
    saved = copy.deepcopy(runs.states(model, optimizer))
    masters = [value.cpu() for value in cases.masters(optimizer)]
    del model, optimizer
    model, optimizer = amp.initialize(*runs.plain("Adam", seed=5), **runs.options(level, 2))
    for part, state in zip((model, optimizer, amp), saved, strict=True):
        part.load_state_dict(state)
    assert cases.same(masters, cases.masters(optimizer))
    assert amp.state_dict() == saved[2]
