"""``scale_loss`` looks through objects that hold a prepared optimizer, as accelerate's do."""

import pytest
import torch
from torch import nn

from apex import amp


class Accelerated(torch.optim.Optimizer):
    """An optimizer without its constructor around another, as ``accelerator.prepare`` returns."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Plain:
    """A wrapper that is no optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


def train(level, wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    used = wrap(optimizer)
    for step in range(4):
        loss = model(torch.randn(8, 4)).float().pow(2).mean() / 2**4
        used.zero_grad()
        with amp.scale_loss(loss * (torch.inf if step == 2 else 1), used) as scaled_loss:
            scaled_loss.backward()
        used.step()
    return [p.detach().clone() for p in amp.master_params(optimizer)], amp.state_dict()


def twice(optimizer):
    return Accelerated(Accelerated(optimizer))


@pytest.mark.parametrize("wrap", [Accelerated, Plain, twice])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapped_optimizer_trains_and_skips_as_the_one_inside(level, wrap):
    expected, scales = train(level, lambda optimizer: optimizer)
    found, found_scales = train(level, wrap)
    assert all(map(torch.equal, expected, found))
    assert scales == found_scales


def test_accelerate_s_own_wrapper_is_looked_through():
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    model, wrapped = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    before = model.weight.detach().clone()
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), wrapped) as scaled_loss:
        scaled_loss.backward()
    wrapped.step()
    assert not torch.equal(before, model.weight)
