"""Unscaling, the scale and its readback on two devices."""

import math

import pytest
import torch

from apex import amp
from apex._torch import foreach

DEVICES = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
pytestmark = pytest.mark.gpu(devices=2)


@pytest.mark.parametrize("other", DEVICES, ids=str)
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_gradients_of_another_device_than_the_flag_are_unscaled_and_checked(other, bad):
    for place in DEVICES:
        grads = [torch.full((3,), 8.0, dtype=d, device=p) for d in DTYPES for p in DEVICES]
        wrong = torch.tensor([1.0 if bad is None else bad], device=other)
        found_inf = torch.zeros((), device=place)
        foreach.unscale_and_check_([*grads, wrong], torch.tensor(0.25, device=place), found_inf)
        for grad in grads:
            assert torch.equal(grad.cpu(), torch.full((3,), 2.0, dtype=grad.dtype))
        assert found_inf.item() == (bad is not None)


def test_numerics_of_a_model_on_two_devices_are_right():
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2, device=device) for device in DEVICES[1:]])
    for index, layer in enumerate(model):
        torch.nn.init.constant_(layer.weight, 2.0 + index)
        torch.nn.init.zeros_(layer.bias)
    assert amp.debug.check_numerics(model) == []
    model[1].weight.data[0, 0] = math.nan
    assert [item.name for item in amp.debug.check_numerics(model)] == ["1.weight"]
