"""Optimizers that declare torch's ``_step_supports_amp_scaling`` skip on an overflow, too."""

import pytest
import torch

from tests.support import training as cases


class Scaling(torch.optim.Optimizer):
    """SGD that declares that its step knows of loss scaling."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self._step_supports_amp_scaling = True
        self.flags = []

    @torch.no_grad()
    def descend(self, skips):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    stepped = param - group["lr"] * param.grad
                    param.copy_(torch.where(skips, param, stepped))


class AsksTheScaler(Scaling):
    """As NVIDIA's ``FusedAdam(capturable=True)``: only a ``grad_scaler`` tells it of inf."""

    def step(self, closure=None, grad_scaler=None):
        assert closure is None
        found = {} if grad_scaler is None else grad_scaler._check_inf_per_device(self)
        self.descend(torch.tensor(any(map(bool, found.values()))))


class ReadsTheFlag(Scaling):
    """As torch's fused optimizers: an attribute tells it of inf, on the device."""

    def step(self, closure=None):
        assert closure is None
        self.flags.append(self.found_inf.bool())
        self.descend(self.flags[-1])


@pytest.mark.parametrize("kind", [AsksTheScaler, ReadsTheFlag])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_overflow_skips_the_step(level, kind):
    model, optimizer = cases.prepared(level, kind, loss_scale="dynamic")
    _, plain = pair = cases.prepared(level, cases.sgd, loss_scale="dynamic")
    for x, y in cases.batches(4, overflow_at={1}):
        cases.train_step(model, optimizer, x, y)
        cases.train_step(*pair, x, y)
    assert all(param.isfinite().all() for param in cases.masters(optimizer))
    torch.testing.assert_close(cases.masters(optimizer), cases.masters(plain))


def test_an_optimizer_that_reads_the_flag_decides_on_the_device():
    model, optimizer = cases.prepared("O1", ReadsTheFlag)
    for x, y in cases.batches(2, overflow_at={1}):
        cases.train_step(model, optimizer, x, y)
    assert [bool(flag) for flag in optimizer.flags] == [False, True]
