"""The optimizers under amp, at every level."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.optimizers import cases

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


class Training:
    def __init__(self, name, level, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.inputs, self.targets = torch.randn(8, 4), torch.randn(8, 2)
        optimizer = cases.MAKERS[name](list(self.model.parameters()))
        self.model, self.optimizer = amp.initialize(
            self.model, optimizer, opt_level=level, verbosity=0, **options
        )

    def step(self, factor=1.0):
        loss = nn.functional.mse_loss(self.model(self.inputs).float(), self.targets)
        self.optimizer.zero_grad()
        with amp.scale_loss(loss * factor, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", cases.MAKERS)
def test_loss_falls_at_every_level(name, level):
    training = Training(name, level)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.002  # NovoGrad that starts from a norm of 0 takes large steps
    losses = [training.step() for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", cases.MAKERS)
def test_overflow_skips_the_step_and_halves_the_scale(name):
    training = Training(name, "O5", loss_scale="dynamic")
    training.step()
    before = cases.snapshot(training.optimizer)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    training.step(factor=float("inf"))
    after = cases.snapshot(training.optimizer)
    cases.assert_same(before[0], after[0], rtol=0, atol=0)
    cases.assert_same(before[1].values(), after[1].values(), rtol=0, atol=0)
    assert before[2] == after[2]
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale / 2


@pytest.mark.parametrize("name", cases.MAKERS)
def test_dynamic_step_waits_for_nothing(name):
    training = Training(name, "O5", loss_scale="dynamic")
    training.step()
    loss = nn.functional.mse_loss(training.model(training.inputs).float(), training.targets)
    with cases.HostReads() as reads:
        with amp.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward()
        training.optimizer.step()
    assert reads.count == 0


@pytest.mark.parametrize("name", cases.MAKERS)
def test_o2_masters_are_what_is_stepped(name):
    training = Training(name, "O2", loss_scale=128.0)
    training.step()
    masters = list(amp.master_params(training.optimizer))
    assert {master.dtype for master in masters} == {torch.float32}
    for model, master in zip(training.model.parameters(), masters, strict=True):
        assert torch.equal(model, master.to(model.dtype))
