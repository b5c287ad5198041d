"""The optimizers under amp, at every level."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", cases.MAKERS)
def test_a_prepared_optimizer_continues_from_a_loaded_state(name, level):
    training = Training(name, level, loss_scale=1.0)
    training.step()
    other = Training(name, level, loss_scale=1.0)
    other.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert [other.step() for _ in range(2)] == [training.step() for _ in range(2)]


class Past(FusedAdam):
    """A subclass that would find itself by ``super`` in a subclass of it."""

    def step(self, closure=None):
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        super(self.__class__, self).zero_grad(set_to_none)


@pytest.mark.parametrize("kind", [FusedAdam, Past])
def test_what_type_of_a_prepared_optimizer_makes_steps_and_leaves_the_prepared_one_alone(kind):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    weight = nn.Parameter(torch.ones(2))
    made = type(optimizer)([weight], lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    for stepped, params in ((made, [weight]), (optimizer, list(model.parameters()))):
        before = [param.detach().clone() for param in params]
        cases.give(params, [torch.ones_like(param) for param in params])
        stepped.step()
        assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))
