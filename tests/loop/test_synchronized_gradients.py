"""Optimizers that average gradients over ranks themselves, by ``synchronize`` (Horovod, BytePS)."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from torch.optim import SGD

from apex import amp
from tests.support import loops


class Averaging(SGD):
    """As Horovod's: ``step`` synchronizes, unless a script has, inside ``scale_loss``.

    It keeps the model's parameters; its groups get masters. The other rank's gradients are zero, so
    averages are halves.
    """

    def __init__(self, params):
        self.pending = list(params)
        super().__init__(self.pending, lr=0.1, momentum=0.9)
        self.synchronizes = True

    def synchronize(self):
        for param in self.pending:
            param.grad.set_(param.grad * 0.5)

    @contextmanager
    def skip_synchronize(self):
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def step(self, closure=None):
        if self.synchronizes:
            self.synchronize()
        return super(self.__class__, self).step(closure)


def in_the_block(model, optimizer, x, y):
    with amp.scale_loss(loops.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def in_the_step(model, optimizer, x, y):
    loops.backward(model, optimizer, x, y)
    optimizer.step()


def after_a_delayed_pass(model, optimizer, x, y):
    loops.backward(model, optimizer, x, y, delay_unscale=True)
    in_the_block(model, optimizer, x, y)


def after_a_plain_pass(model, optimizer, x, y):
    loops.loss_of(model, x, y).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


WAYS = [in_the_block, after_a_delayed_pass, after_a_plain_pass]


# With masters, inside the block, as in apex.
CASES = [("O1", in_the_step), *itertools.product(loops.LEVELS_SHORT, WAYS)]


@pytest.mark.parametrize(("level", "train"), CASES)
def test_the_step_takes_averages(level, train):
    scale = 1.0 if level == "O5" or train is after_a_plain_pass else 128.0
    model, optimizer = loops.prepared(level, Averaging, loss_scale=scale)
    plain = loops.net()
    by_hand = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    passes = 2 if train is after_a_delayed_pass else 1
    for x, y in loops.batches(3):
        optimizer.zero_grad()
        by_hand.zero_grad()
        train(model, optimizer, x, y)
        (loops.loss_of(plain, x, y) * 0.5 * passes).backward()
        by_hand.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0.0, atol=4e-3)
    amp.restore(model, optimizer)
    loops.loss_of(model, x, y).backward()
    optimizer.step()


def test_an_overflow_that_comes_from_another_rank_skips_the_step():
    model, optimizer = loops.prepared("O2", Averaging, loss_scale="dynamic")
    before = loops.masters(optimizer)
    with amp.scale_loss(loops.loss_of(model, *loops.batch()), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.synchronize()
        model[0].weight.grad.fill_(float("inf"))
    with optimizer.skip_synchronize():
        optimizer.step()
    assert loops.same(loops.masters(optimizer), before)
