"""Training loops and optimizer steps on a device, without a wait."""

import itertools
import math

import pytest
import torch

from apex import amp
from tests.support import fused, loops
from tests.support.emulated_cuda import device
from tests.support.host_reads import waits_are_errors

pytestmark = pytest.mark.gpu(devices=2)


def on(place, batches):
    return [tuple(tensor.to(place) for tensor in batch) for batch in batches]


def train_on(level, place):
    """Masters after four steps of which the second overflows, the scale, and what was skipped."""
    model, scale = loops.net().to(place), {"loss_scale": "dynamic", "growth_interval": 3}
    model, optimizer = loops.prepared(level, loops.fused_adamw_of, model, **scale)
    batches, skipped = on(place, loops.batches(4, overflow_at={1})), []
    with waits_are_errors():
        for x, y in batches:
            loops.train_step(model, optimizer, x, y)
            skipped.append(amp.step_was_skipped(optimizer))
            assert amp.step_was_skipped(optimizer, on_host=True) in (None, True, False)
    assert {flag.device for flag in skipped} == {torch.device(place)}
    masters = [master.cpu() for master in loops.masters(optimizer)]
    return masters, loops.loss_scale(), list(map(bool, skipped))


def test_loops_have_the_numbers_of_the_cpu_and_wait_for_nothing(level):
    weights, *rest = train_on(level, "cuda:1")
    expected, *expected_rest = train_on(level, "cpu")
    assert rest == expected_rest == [2.0**15, [False, True, False, False]]
    torch.testing.assert_close(weights, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", fused.MAKERS)
def test_a_flag_of_any_device_skips_parameters_of_every_device(name):
    """The gate of apex's optimizers: parameters on the CPU and two devices, one flag."""
    places = ("cpu", "cuda:0", "cuda:1")
    params = [torch.nn.Parameter(torch.full((3, 2), 2.0, device=place)) for place in places]
    optimizer = fused.MAKERS[name](params)
    for flag_on, skipped in zip(places, (False, True, False), strict=True):
        before = [param.detach().to("cpu", copy=True) for param in params]
        for param in params:
            param.grad = torch.full_like(param, 0.25)
        optimizer.found_inf = torch.tensor(float(skipped), device=flag_on)
        optimizer.step()
        del optimizer.found_inf
        after = [param.detach().to("cpu", copy=True) for param in params]
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old, new) is skipped
        assert all(torch.equal(after[0], other) for other in after[1:])


@pytest.mark.parametrize("name", fused.MAKERS)
def test_a_grad_scaler_steps_parameters_on_two_devices(name):
    """GradScaler's own interface, with a scale on one device and gradients on both."""
    params = [torch.nn.Parameter(torch.ones(2, device=f"cuda:{index}")) for index in (0, 1)]
    optimizer = fused.MAKERS[name](params)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for factor in (1.0, math.inf):
        before = [param.detach().clone() for param in params]
        optimizer.zero_grad()
        loss = params[0].sum() + params[1].sum().to("cuda:0") * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for old, new in zip(before, params, strict=True):
            assert torch.equal(old, new.detach()) is (factor == math.inf)
    assert scaler.get_scale() == 4.0


@pytest.mark.emulated
def test_clipping_and_reading_the_scale_in_between_is_all_that_waits():
    model, optimizer = loops.prepared("O2", loops.fused_adamw_of, model=loops.net().cuda())
    batches = on("cuda", loops.batches(2))
    device.waits()
    for x, y in batches:
        optimizer.zero_grad()
        loops.backward(model, optimizer, x, y)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    assert device.waits() == []
    amp.state_dict()
    assert set(device.waits()) == {"aten::_local_scalar_dense"}


OTHERS = {
    "Adam": lambda params: torch.optim.Adam(params, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, foreach=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, foreach=True),
}
FUSED = {
    "fused Adam": lambda params: torch.optim.Adam(params, fused=True),
    "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    **{name: fused.MAKERS[name] for name in ("FusedAdam", "FusedLAMB", "FusedSGD")},
}


@pytest.mark.emulated
@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_only_an_optimizer_that_cannot_skip_on_the_device_waits_once_where_it_may_skip(name):
    for level, loss_scale in itertools.product(loops.LEVELS_SHORT, (None, "dynamic")):
        make = {**FUSED, **OTHERS}[name]
        model, optimizer = loops.prepared(level, make, loops.net().cuda(1), loss_scale=loss_scale)
        dynamic = loss_scale == "dynamic" or level != "O5"
        batches = on("cuda:1", loops.batches(6, overflow_at={3} if dynamic else ()))
        for part in (batches[:2], batches[2:]):
            device.waits()
            for x, y in part:
                loops.train_step(model, optimizer, x, y)
        assert len(device.waits()) == (4 if dynamic and name in OTHERS else 0)
