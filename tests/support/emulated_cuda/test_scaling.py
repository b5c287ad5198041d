"""Unscaling, the scale and its readback on two devices."""

import math

import pytest
import torch

from apex import amp
from apex._core import finite
from apex._core.foreach.norms import any_non_finite, stacked
from apex._core.foreach.scalars import as_scalar, as_tensor, skip_flag
from apex._core.scale import ScaleRule
from apex._engine.events import ScaleUpdate
from apex._engine.readback import Readback
from apex._engine.scaler import DynamicScaler
from tests.support.emulated_cuda import device

DEVICES = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
pytestmark = pytest.mark.gpu(devices=2)
places = pytest.mark.parametrize("place", DEVICES, ids=str)
others = pytest.mark.parametrize("other", DEVICES, ids=str)


@places
@others
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_gradients_of_another_device_than_the_flag_are_unscaled_and_checked(place, other, bad):
    grads = [torch.full((3,), 8.0, dtype=d, device=p) for d in DTYPES for p in DEVICES]
    wrong = torch.tensor([1.0 if bad is None else bad], device=other)
    found_inf = torch.zeros((), device=place)
    finite.unscale_and_check_([*grads, wrong], torch.tensor(0.25, device=place), found_inf)
    assert all(torch.equal(grad.cpu(), torch.full((3,), 2.0, dtype=grad.dtype)) for grad in grads)
    assert found_inf.item() == (bad is not None)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_bf16_gradients_on_a_device_are_unscaled_as_on_the_cpu(bad):
    torch.manual_seed(0)
    host = [torch.randn(5).bfloat16(), torch.randn(2, 3).bfloat16()]
    if bad is not None:
        host[1][0, 0] = bad
    there = [grad.cuda() for grad in host]
    flags = [torch.zeros(()), torch.zeros((), device="cuda")]
    finite.unscale_and_check_(host, torch.tensor(1 / 3), flags[0])
    finite.unscale_and_check_(there, torch.tensor(1 / 3, device="cuda"), flags[1])
    assert all(
        torch.allclose(b.cpu(), a, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(host, there, strict=True)
    )
    assert flags[1].item() == flags[0].item() == (bad is not None)


@places
@others
def test_numbers_and_flags_are_taken_from_any_device(place, other):
    for flag in (0.0, 1.0):
        skip = skip_flag(torch.tensor([flag], device=other), place)
        assert skip.device == place
        assert skip.tolist() == flag
    number = torch.tensor([3.0], device=other)
    assert as_tensor(number, place).tolist() == as_scalar(number, place).tolist() == 3.0


@places
def test_norms_of_tensors_on_several_devices_are_stacked_on_one(place):
    norms = [torch.tensor(float(i), device=other) for i, other in enumerate(DEVICES)]
    assert stacked(norms, place).tolist() == [0.0, 1.0, 2.0]
    bad = [
        torch.tensor([1.0, math.inf if i == 2 else 1.0], device=d) for i, d in enumerate(DEVICES)
    ]
    assert any_non_finite(bad, place).tolist() is True
    assert any_non_finite(bad[:2], place).tolist() is False


def run_pass(scaler, place, value):
    scaler.scale(torch.ones((), device=place))
    scaler.begin_pass()
    scaler.unscale_([torch.tensor([value], device=place)])
    scaler.update(1)


def test_a_scale_keeps_its_state_on_its_way_through_devices():
    scaler = DynamicScaler(ScaleRule(growth_interval=2))
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
    scaler = DynamicScaler(ScaleRule())
    scaler.scale(torch.ones((), device="cuda:1"))
    grad = torch.tensor([math.inf], device="cuda:1")
    device.waits()
    scaler.begin_pass()
    scaler.unscale_([grad])
    scaler.update(1)
    device.set_events_pass(False)
    assert scaler.read_updates() == []
    device.set_events_pass(True)
    assert scaler.read_updates() == [ScaleUpdate(0, 2.0**15, True, 1, 1)]
    assert device.waits() == []


@pytest.mark.emulated
def test_a_report_that_blocks_on_the_readback_gets_it_at_once():
    scaler = DynamicScaler(ScaleRule())
    scaler.block_on_read = True
    device.set_events_pass(False)
    try:
        run_pass(scaler, "cuda:1", math.inf)
        assert [update.overflow for update in scaler.read_updates()] == [True]
    finally:
        device.set_events_pass(True)


@pytest.mark.parametrize("current", [0, 1])
def test_readings_of_two_devices_arrive_in_order(current):
    readback = Readback()
    with torch.cuda.device(current):
        for index in range(6):
            readback.send(index, torch.tensor([float(index)], device=DEVICES[index % 3]))
        assert readback.poll() == [(index, (float(index),)) for index in range(6)]


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
