"""Under autocast and at amp's levels norms have autocast's dtype, and leave the switch alone."""

import pytest
import torch
from torch import nn

from apex import amp, normalization
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.normalization import fused_layer_norm as fused
from tests.normalization import cases
from tests.normalization.cases import BF16, DOUBLE, FULL, HALF, SIZE
from tests.support.reference import norms

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [FULL, BF16, HALF])
@pytest.mark.parametrize("low", [BF16, HALF])
@pytest.mark.parametrize("name", cases.AFFINE)
def test_functions_give_autocasts_dtype(name, low, given, device):
    made = cases.tensors(given, FULL, device=device)
    with torch.autocast(device, low):
        result = cases.run(name, *made)
    assert result.dtype is low


@pytest.mark.parametrize("name", cases.PLAIN)
def test_functions_without_parameters_give_autocasts_dtype(name):
    with torch.autocast("cpu", BF16):
        assert getattr(fused, name)(torch.randn(2, SIZE), (SIZE,)).dtype is BF16


@pytest.mark.parametrize("name", cases.MODULES)
def test_modules_give_autocasts_dtype(name):
    module = getattr(normalization, name)(SIZE)
    with torch.autocast("cpu", BF16):
        assert module(torch.randn(2, SIZE)).dtype is BF16


@pytest.mark.parametrize("name", cases.AFFINE)
def test_fp32_input_is_normalized_in_fp32_before_it_is_rounded(name):
    # Far from zero, the differences that count are lost in bf16.
    x, weight, bias = cases.tensors()
    x = x + 100
    with torch.autocast("cpu", BF16):
        result = cases.run(name, x, weight, bias)
    norms.assert_close(result, cases.reference(name, x, weight, bias))


@pytest.mark.parametrize("name", cases.AFFINE)
def test_bf16_input_under_fp16_autocast_is_rounded_to_fp16_alone(name):
    made = cases.tensors(BF16)
    with torch.autocast("cpu", HALF):
        result = cases.run(name, *made)
    norms.assert_close(result, cases.reference(name, *made))


@pytest.mark.parametrize("name", cases.AFFINE)
def test_float64_stays_float64(name):
    with torch.autocast("cpu", BF16):
        assert cases.run(name, *cases.tensors(DOUBLE)).dtype is DOUBLE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", cases.AFFINE)
def test_autograd_functions_ignore_autocast(name, device):
    made = cases.tensors(device=device)
    function = getattr(fused, cases.FUNCTION_CLASSES[name])
    with torch.autocast(device, BF16):
        result = function.apply(*cases.leaves(name, *made), (SIZE,), 1e-5)
    assert result.dtype is FULL


def test_autocast_is_on_after_a_norm_and_after_one_that_failed():
    with torch.autocast("cpu", BF16):
        FusedLayerNorm(SIZE)(torch.randn(2, SIZE))
        with pytest.raises(RuntimeError):
            FusedLayerNorm(SIZE)(torch.randn(2, 5))
        assert torch.is_autocast_enabled("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, SIZE), nn.Linear(SIZE, 2)
        self.norm, self.rms = FusedLayerNorm(SIZE), FusedRMSNorm(SIZE)

    def forward(self, x):
        self.seen = self.rms(self.norm(self.first(x)))
        return self.last(self.seen)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_norms_train_at_every_level_in_its_dtype(level):
    model = Net()
    model, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        opt_level=level,
        verbosity=0,
        loss_scale=8.0,
    )
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    loss = model(torch.randn(6, 4)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    low = {"O0": FULL, "O1": HALF, "O2": HALF, "O3": HALF, "O4": BF16, "O5": BF16}
    assert model.seen.dtype is low[level]
    after = list(amp.master_params(optimizer))
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
