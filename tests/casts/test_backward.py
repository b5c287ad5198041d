"""User code in backward passes, by public calls: the dtypes that apex gave, and plain gradients."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
LEVELS = pytest.mark.parametrize("level", ["O1", "O4"])


class OwnLinear(torch.autograd.Function):
    """Its backward multiplies a 16-bit gradient by the fp32 weight that it saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Own(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.recompute = recompute

    def block(self, x):
        return OwnLinear.apply(self.first(x), self.second.weight)

    def forward(self, x):
        if self.recompute is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.recompute)


def gradients(level, device, *, recompute=None, scaled=True):
    torch.manual_seed(0)
    model = Own(recompute).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level is not None:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0
        )
    loss = model(torch.ones(2, 4, device=device, requires_grad=True)).float().pow(2).sum()
    if level is not None and scaled:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    return [param.grad.cpu() for param in model.parameters() if param.grad is not None]


@DEVICES
@LEVELS
@pytest.mark.parametrize("recompute", [None, True, False], ids=["plain", "reentrant", "not"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scale_loss", "backward"])
def test_a_functions_own_backward_may_mix_dtypes(level, device, recompute, scaled):
    expected = gradients(None, device)
    got = gradients(level, device, recompute=recompute, scaled=scaled)
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)


@DEVICES
@LEVELS
def test_gradients_of_code_without_casts_are_those_of_fp32(level, device):
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, device=device)
    expected = torch.autograd.grad(model(x).pow(2).sum(), model.weight)[0]
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0
    )
    with amp.disable_casts():
        loss = model(x).pow(2).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(model.weight.grad, expected)
