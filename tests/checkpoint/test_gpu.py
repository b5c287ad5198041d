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


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_checkpoint_moves_between_devices(level):
    model, optimizer = amp.initialize(*plain("SGD", seed=0), **runs.options(level, 2))
    train(model, optimizer, "SGD", cases.batches(2))
    saved = copy.deepcopy(runs.states(model, optimizer))
    masters = [value.cpu() for value in cases.masters(optimizer)]
    del model, optimizer
    model, optimizer = amp.initialize(*runs.plain("SGD", seed=5), **runs.options(level, 2))
    for part, state in zip((model, optimizer, amp), saved, strict=True):
        part.load_state_dict(state)
    assert cases.same(masters, cases.masters(optimizer))
    assert amp.state_dict() == saved[2]
