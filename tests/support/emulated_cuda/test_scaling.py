"""Unscaling, the scale and its readback on two devices."""

import math

import pytest
import torch

from apex import amp
from apex._core import finite
from apex._core.scale import ScaleRule
from apex._engine.scaler import DynamicScaler, ScaleUpdate
from tests.support.emulated_cuda import device

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
        finite.unscale_and_check_([*grads, wrong], torch.tensor(0.25, device=place), found_inf)
        for grad in grads:
            assert torch.equal(grad.cpu(), torch.full((3,), 2.0, dtype=grad.dtype))
        assert found_inf.item() == (bad is not None)


def run_pass(scaler, place, value):
    _, scale = scaler.scale(torch.ones((), device=place))
    scaler.found_inf.zero_()
    scaler.unscale_([torch.tensor([value], device=place)], scale)
    scaler.end_pass(1)


def test_a_scale_keeps_its_state_on_its_way_through_devices():
    scaler = DynamicScaler(2.0**16, ScaleRule(growth_interval=2))
    for place, value, scale in (
        ("cpu", 1.0, 2.0**16),
        ("cuda:0", math.inf, 2.0**15),
        ("cuda:1", 1.0, 2.0**15),
        ("cuda:0", 1.0, 2.0**16),
        ("cpu", math.nan, 2.0**15),
    ):
        run_pass(scaler, place, value)
        assert scaler.loss_scale.device == torch.device(place)
        assert scaler.loss_scale.item() == scale
    scales = [update.loss_scale for update in scaler.read_updates()]
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15]


@pytest.mark.emulated
def test_a_pass_on_a_device_waits_for_nothing():
    scaler = DynamicScaler(2.0**16, ScaleRule())
    grad = torch.tensor([math.inf], device="cuda:1")
    device.waits()
    device.set_events_pass(False)
    try:
        _, scale = scaler.scale(torch.ones((), device="cuda:1"))
        scaler.unscale_([grad], scale)
        scaler.end_pass(1)
        found = scaler.read_updates()
    finally:
        device.set_events_pass(True)
    update = ScaleUpdate(2.0**15, True, 1, 1)
    assert found == device.waits() == []
    assert scaler.read_updates() == [update]


def test_numerics_of_a_model_on_two_devices_are_right():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2, device="cuda:0"), torch.nn.Linear(2, 2, device="cuda:1")
    )
    for index, layer in enumerate(model):
        torch.nn.init.constant_(layer.weight, 2.0 + index)
        torch.nn.init.zeros_(layer.bias)
    assert amp.debug.check_numerics(model) == []
    model[1].weight.data[0, 0] = math.nan
    assert [item.name for item in amp.debug.check_numerics(model)] == ["1.weight"]
