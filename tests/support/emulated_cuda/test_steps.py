"""Training loops and optimizer steps on a device, without a wait."""

import math

import pytest
import torch

from apex import amp
from tests.support import optimizers
from tests.support import training as cases
from tests.support.emulated_cuda import device

ADAMW = cases.OPTIMIZERS["fused AdamW"]
pytestmark = pytest.mark.gpu(devices=2)


@pytest.fixture
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def on(place, batches):
    return [tuple(tensor.to(place) for tensor in batch) for batch in batches]


def trained(level, place, **options):
    """Masters after four steps of which the second overflows, and the loss scale."""
    model, optimizer = cases.prepared(level, ADAMW, model=cases.net().to(place), **options)
    batches = on(place, cases.batches(4, overflow_at={1}))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in batches:
            cases.train_step(model, optimizer, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [master.cpu() for master in cases.masters(optimizer)], cases.loss_scale()


class Prefetcher:
    """Moves the next batch on a stream of its own while this one trains, as many scripts do."""

    def __init__(self, batches):
        self.batches = iter(batches)
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self):
        with torch.cuda.stream(self.stream):
            self.next = [
                tensor.pin_memory().to("cuda", non_blocking=True)
                for tensor in next(self.batches, ())
            ]

    def __iter__(self):
        while self.next:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_batches_that_a_stream_of_their_own_moves_train_alike(level):
    def masters(batches):
        model, optimizer = cases.prepared(level, ADAMW, model=cases.net().to("cuda"))
        for x, y in batches:
            cases.train_step(model, optimizer, x, y)
        return cases.masters(optimizer)

    usual = masters(on("cuda", cases.batches(3)))
    assert cases.same(masters(Prefetcher(cases.batches(3))), usual)


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_loops_have_the_numbers_of_the_cpu_and_wait_for_nothing(level, place):
    weights, scale = trained(level, place, loss_scale="dynamic")
    expected, expected_scale = trained(level, "cpu", loss_scale="dynamic")
    assert scale == expected_scale == 2.0**15
    for one, other in zip(weights, expected, strict=True):
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-3)
        assert one.isfinite().all()


def test_what_waits_is_an_error_here(syncs_are_errors):
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.ones((), device="cuda").item()


def test_a_skipped_step_leaves_masters_and_state_on_the_device():
    model, optimizer = cases.prepared("O2", ADAMW, model=cases.net().cuda(1))
    (good,), (bad,) = (on("cuda:1", cases.batches(1, overflow_at=at)) for at in ((), {0}))
    cases.train_step(model, optimizer, *good)
    before = cases.masters(optimizer), optimizer.state_dict()["state"]
    before = [before[0], {k: {n: v.clone() for n, v in s.items()} for k, s in before[1].items()}]
    cases.train_step(model, optimizer, *bad)
    assert cases.same([cases.masters(optimizer), optimizer.state_dict()["state"]], before)


@pytest.mark.parametrize("flag_on", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("name", optimizers.MAKERS)
def test_a_flag_of_any_device_skips_parameters_of_every_device(name, flag_on):
    """The gate of apex's optimizers: parameters on the CPU and two devices, one flag."""
    params = [
        torch.nn.Parameter(torch.full((3, 2), 2.0, device=place))
        for place in ("cpu", "cuda:0", "cuda:1")
    ]
    optimizer = optimizers.MAKERS[name](params)
    for skipped in (False, True, False):
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


@pytest.mark.parametrize("name", optimizers.MAKERS)
def test_a_grad_scaler_steps_parameters_on_two_devices(name):
    """GradScaler's own interface, with a scale on one device and gradients on both."""
    params = [torch.nn.Parameter(torch.ones(2, device=f"cuda:{index}")) for index in (0, 1)]
    optimizer = optimizers.MAKERS[name](params)
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
    model, optimizer = cases.prepared("O2", ADAMW, model=cases.net().cuda())
    batches = on("cuda", cases.batches(2))
    device.waits()
    for x, y in batches:
        optimizer.zero_grad()
        cases.backward(model, optimizer, x, y)
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
    "Adam": lambda params: torch.optim.Adam(params, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    **optimizers.MAKERS,
}


def waits_of(level, make, loss_scale):
    """What the host waits for in four iterations, after two to start with; one overflows."""
    model, optimizer = cases.prepared(level, make, cases.net().cuda(1), loss_scale=loss_scale)
    batches = on("cuda:1", cases.batches(6, overflow_at={3} if loss_scale == "dynamic" else ()))
    for x, y in batches[:2]:
        cases.train_step(model, optimizer, x, y)
    device.waits()
    for x, y in batches[2:]:
        cases.train_step(model, optimizer, x, y)
    return device.waits()


@pytest.mark.emulated
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_iteration_with_an_optimizer_that_skips_on_the_device_waits_for_nothing(
    level, loss_scale, name
):
    assert waits_of(level, FUSED[name], loss_scale) == []


@pytest.mark.emulated
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_iteration_with_any_other_optimizer_waits_once_and_only_where_it_may_skip(
    level, loss_scale, name
):
    dynamic = loss_scale == "dynamic" or level in ("O1", "O2")
    assert len(waits_of(level, OTHERS[name], loss_scale)) == (4 if dynamic else 0)


@pytest.mark.emulated
def test_whether_a_step_was_skipped_is_asked_without_a_wait():
    model, optimizer = cases.prepared("O2", ADAMW, model=cases.net().cuda())
    batches = on("cuda", cases.batches(6, overflow_at={0, 2}))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in batches:
            cases.train_step(model, optimizer, 0.01 * x, 0.01 * y)
            skipped = amp.step_was_skipped(optimizer)
            assert skipped.device.type == "cuda"
            assert amp.step_was_skipped(optimizer, on_host=True) in (None, True, False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
