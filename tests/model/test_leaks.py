"""Nothing grows: over cycles of initialize and its end, and over forward passes in a row."""

import gc
import sys

import pytest
import torch

from apex import amp
from tests.support import loops

CYCLES = 20
MEASUREMENTS = 20


def held():
    """Returns how many tensors live, and how many blocks of memory Python holds."""
    gc.collect()
    tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    return tensors, sys.getallocatedblocks()


def grows(act, times, least):
    """Returns whether ``times`` calls leave at least so many blocks of memory, each time.

    Python's own caches grow now and then, most of all in a process that has just begun.
    """
    for _ in range(MEASUREMENTS):
        _, before = held()
        for _ in range(times):
            act()
        if held()[1] - before < least:
            return False
    return True


def cycle(level, *, restores):
    model, optimizer = loops.trained(level, loops.OPTIMIZERS["Adam"])
    if restores:
        amp.restore(model, optimizer)


RESTORED = [("O2", True), ("O1", True), ("O1", False), ("O5", False)]


@pytest.mark.parametrize(("level", "restores"), RESTORED)
def test_cycles_leave_no_tensor_and_no_object(level, restores):
    for _ in range(3):
        cycle(level, restores=restores)
    tensors, _ = held()
    assert not grows(lambda: cycle(level, restores=restores), CYCLES, CYCLES / 2)
    assert held()[0] <= tensors  # fewer where an earlier test's go in the meantime
    assert loops.live_sessions() == 0


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_parts_that_are_replaced_leave_nothing(level):
    model, _ = loops.prepared(level)

    def replace():
        model[2] = torch.nn.Linear(8, 2)
        model.state_dict()  # gives the part its hooks

    for _ in range(10):
        replace()
    assert not grows(replace, 100, 100)


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_1000_eval_steps_leave_no_tensor_and_no_cached_cast(level):
    model, _ = loops.prepared(level)
    model.eval()
    x, _ = loops.batch()
    with torch.no_grad():
        for _ in range(10):
            model(x)
        tensors, _ = held()
        assert not grows(lambda: model(x), 1000, 100)
        assert held()[0] <= tensors  # fewer where an earlier test's go in the meantime
        before = model(x)
        model[0].weight.data.zero_()  # a cast of it that was kept would be served now
        assert not loops.same(model(x), before)
