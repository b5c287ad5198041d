"""``amp.debug`` without ``amp.initialize``: torch.autocast, GradScaler, 16-bit and fp32 models."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.loops import batch, net


class Plain:
    """A training loop of plain torch."""

    def __init__(self, *, autocast=None, scale=None):
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.autocast = autocast
        enabled = scale is not None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=enabled)

    def loss(self, x, y):
        with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
            output = self.model(x)
        return ((output.float() - y) ** 2).mean()

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(x, y)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_a_gradient_too_large_for_its_scale_is_no_fault_of_the_model():
    loop = Plain(autocast=torch.float16, scale=2.0**24)
    with amp.debug.trace_overflow(loop.model, scaler=loop.scaler) as trace:
        loop.step(*batch())
    assert (trace.first.cause, trace.first.direction) == ("loss scale", "backward")
    assert trace.first.heals


def test_a_scaler_that_is_none_is_refused():
    with pytest.raises(TypeError, match="got int as the scaler"):
        amp.debug.trace_overflow(net(), scaler=3)


@pytest.mark.parametrize("tool", [amp.debug.History, amp.debug.arm])
def test_what_watches_a_loss_scale_of_amp_refuses_a_plain_optimizer(tool):
    with pytest.raises(ValueError, match=r"has not prepared.*apex trace train\.py"):
        tool(Plain().optimizer)
    with pytest.raises(TypeError, match="got Linear instead of an optimizer"):
        tool(nn.Linear(1, 1))


@pytest.mark.parametrize("options", [{}, {"autocast": torch.float16, "scale": 2.0**10}])
def test_why_skipped_names_the_gradients_of_every_loop(options):
    loop = Plain(**options)
    loop.step(*batch())
    assert amp.debug.why_skipped(loop.optimizer) == []
    x, y = batch()
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(x, y) + loop.model[2].bias[0].float() * torch.inf).backward()
    found = amp.debug.why_skipped(loop.optimizer, model=loop.model)
    assert [(item.name, item.inf) for item in found] == [("2.bias", 1)]
    (unnamed,) = amp.debug.why_skipped(loop.optimizer)
    assert unnamed.name == "parameter 3"
