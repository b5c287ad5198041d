"""Optimizers that average gradients over ranks themselves, by ``synchronize`` (Horovod, BytePS)."""

from contextlib import contextmanager

import pytest
import torch
from torch.optim import SGD

from apex import amp
from tests.support import training as cases

LEVELS = ("O0", "O1", "O2", "O4", "O5")


class Averaging(SGD):
    """As Horovod's: ``step`` synchronizes, unless a script has, inside ``scale_loss``.

    It keeps the model's parameters beside its groups, which have masters.

    The other rank's gradients are zero, so averages are halves.
    """

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=0.1, momentum=0.9)
        self.pending = set(params)
        self.names = {param: str(index) for index, param in enumerate(params)}
        self.bucket_of = dict.fromkeys(params[:2], (params[0], params[1]))
        self.sizes = {(params[0], params[1]): 2}
        self.synchronizes = True

    def synchronize(self):
        assert self.pending == self.names.keys()
        assert all(self.sizes[bucket] == len(bucket) for bucket in self.bucket_of.values())
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


def train(level, count=3, *, inside, **options):
    model, optimizer = cases.prepared(level, Averaging, **options)
    for x, y in cases.batches(count):
        step(model, optimizer, x, y, inside=inside)
    return model, optimizer


def step(model, optimizer, x, y, *, inside, delay=False):
    optimizer.zero_grad()
    if delay:
        with amp.scale_loss(cases.loss_of(model, x, y), optimizer, delay_unscale=True) as scaled:
            scaled.backward()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
        if inside:
            optimizer.synchronize()
    if inside:
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()


def expected(count=3, factor=0.5):
    model = cases.net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in cases.batches(count):
        optimizer.zero_grad()
        (cases.loss_of(model, x, y) * factor).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("level", "inside"),
    [*((level, True) for level in LEVELS), *((level, False) for level in ("O0", "O1", "O4"))],
)
def test_the_step_takes_averages(level, inside):
    options = {"loss_scale": 128.0} if level in ("O1", "O2") else {}
    model, _ = train(level, inside=inside, **options)
    torch.testing.assert_close(model.state_dict(), expected(), rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_pass_that_completes_a_delayed_one_is_averaged_with_it(level):
    model, optimizer = cases.prepared(level, Averaging, loss_scale=128.0)
    for x, y in cases.batches(3):
        step(model, optimizer, x, y, inside=True, delay=True)
    torch.testing.assert_close(model.state_dict(), expected(factor=1.0), rtol=0.0, atol=4e-3)


def test_an_overflow_that_comes_from_another_rank_skips_the_step():
    model, optimizer = cases.prepared("O2", Averaging, loss_scale="dynamic")
    before = cases.masters(optimizer)
    optimizer.zero_grad()
    with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.synchronize()
        model[0].weight.grad.fill_(float("inf"))
    with optimizer.skip_synchronize():
        optimizer.step()
    assert cases.same(cases.masters(optimizer), before)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_gradients_of_a_plain_pass_are_averaged(level):
    model, optimizer = cases.prepared(level, Averaging, loss_scale=1.0)
    for x, y in cases.batches(3):
        optimizer.zero_grad()
        cases.loss_of(model, x, y).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), expected(), rtol=0.0, atol=2e-3)
