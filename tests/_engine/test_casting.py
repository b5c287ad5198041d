"""Cast regions: where casts are on, in which thread, and what is left when they end."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.region import (
    CastRegion,
    UncastRegion,
    active_dtype,
    active_spec,
    no_casts,
)

BF16 = CastSpec(torch.bfloat16, ("cpu",), OpTable.default())
FP16 = CastSpec(torch.float16, ("cpu",), OpTable.default())


@pytest.fixture
def region():
    region = CastRegion(BF16)
    yield region
    region.leave_ambient()


def seen(x: torch.Tensor | None = None) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes that a matmul (torch's row) and exp of bf16 (a filled row) give here."""
    x = torch.ones(2, 2) if x is None else x
    return (x @ x).dtype, torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype


ON = (torch.bfloat16, torch.float32)
OFF = (torch.float32, torch.bfloat16)
NATIVE = (torch.bfloat16, torch.bfloat16)


def in_thread(fn):
    result = []
    thread = threading.Thread(target=lambda: result.append(fn()))
    thread.start()
    thread.join()
    return result[0]


def kernel_is_there(op: str = "exp") -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCPU")


def state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


# -- run ------------------------------------------------------------------------------------------


def test_run_casts_inside_and_not_outside(region):
    assert seen() == OFF
    assert region.run(seen) == ON
    assert seen() == OFF


def test_run_passes_arguments_and_result_through(region):
    assert region.run(lambda *args, **kwargs: (args, kwargs), 1, fn=2, self=3) == (
        (1,),
        {"fn": 2, "self": 3},
    )


def test_run_casts_in_any_thread(region):
    assert in_thread(lambda: region.run(seen)) == ON


def test_run_leaves_no_trace_after_an_exception(region):
    before = state()

    def fail():
        raise KeyError("inside")

    with pytest.raises(KeyError):
        region.run(fail)
    assert state() == before
    assert active_spec() is None
    assert region.run(seen) == ON


def test_inner_region_rules_inside_and_the_outer_one_after_it(region):
    half = CastRegion(FP16)

    def outer():
        inside = half.run(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return inside, active_spec(), seen()

    assert region.run(outer) == (torch.float16, BF16, ON)


def test_users_autocast_off_inside_a_run_is_respected(region):
    def off():
        with torch.autocast("cpu", enabled=False):
            return seen()

    assert region.run(off) == OFF


def test_another_device_type_is_not_cast(region):
    assert not region.run(torch.is_autocast_enabled, "cuda")


def test_device_type_without_autocast_is_refused():
    with pytest.raises(ValueError, match=r"meta.*cpu, cuda, xpu, mps.*O2"):
        CastRegion(CastSpec(torch.float16, ("meta",), OpTable.default()))


# -- ambient --------------------------------------------------------------------------------------


def test_ambient_casts_until_left(region):
    before = state()
    region.enter_ambient()
    assert seen() == ON
    assert active_spec() is BF16
    region.leave_ambient()
    assert seen() == OFF
    assert state() == before
    region.leave_ambient()
    assert state() == before


def test_ambient_does_not_reach_other_threads(region):
    region.enter_ambient()
    assert in_thread(seen) == OFF
    assert in_thread(active_spec) is None


@pytest.mark.parametrize("first_left", ["older", "newer"])
def test_newest_living_ambient_region_rules(first_left):
    before = state()
    older, newer = CastRegion(BF16), CastRegion(FP16)
    older.enter_ambient()
    newer.enter_ambient()
    assert active_spec() is FP16
    (older if first_left == "older" else newer).leave_ambient()
    assert active_spec() is (FP16 if first_left == "older" else BF16)
    (newer if first_left == "older" else older).leave_ambient()
    assert active_spec() is None
    assert state() == before


def test_state_of_the_user_comes_back_after_ambient(region):
    with torch.autocast("cpu", torch.float16):
        before = state()
        region.enter_ambient()
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        region.leave_ambient()
        assert state() == before


def test_ambient_ends_with_its_region(region):
    other = CastRegion(FP16)
    other.enter_ambient()
    del other
    gc.collect()
    assert seen() == OFF
    assert active_spec() is None


def test_ambient_left_from_another_thread_ends_at_the_next_entry(region):
    before = state()
    region.enter_ambient()
    other_before = in_thread(state)
    assert in_thread(lambda: (region.leave_ambient(), state())[1]) == other_before
    assert UncastRegion().run(seen) == OFF
    with no_casts():
        pass
    assert state() == before
    assert seen() == OFF


def test_ambient_left_inside_its_own_run_ends_after_it(region):
    before = state()
    region.enter_ambient()

    def leave():
        region.leave_ambient()
        return seen()

    assert region.run(leave) == ON
    assert state() == before


# -- off ------------------------------------------------------------------------------------------


def test_no_casts_turns_casts_off_and_back_on(region):
    region.enter_ambient()
    with no_casts():
        assert seen() == OFF
        assert active_spec() is None
        with no_casts():
            assert seen() == OFF
        assert seen() == OFF
    assert seen() == ON


def test_no_casts_is_exception_safe(region):
    region.enter_ambient()
    with pytest.raises(KeyError), no_casts():
        raise KeyError("inside")
    assert seen() == ON


@pytest.mark.parametrize("ambient", [True, False])
def test_regions_stay_off_inside_no_casts(region, ambient):
    if ambient:
        region.enter_ambient()
    with no_casts():
        assert region.run(seen) == OFF
    assert region.run(seen) == ON


def test_no_casts_leaves_the_users_autocast_alone(region):
    with torch.autocast("cpu", torch.bfloat16), no_casts():
        assert seen() == NATIVE


def test_no_casts_can_be_left_and_entered_again(region):
    # As an optimizer's step does around the closure it is given.
    region.enter_ambient()
    off = no_casts()
    with off:
        off.__exit__(None, None, None)
        assert region.run(seen) == ON
        off.__enter__()
        assert region.run(seen) == OFF
    assert seen() == ON


def test_uncast_region_is_off_inside_and_a_cast_region_in_it_on(region):
    region.enter_ambient()
    assert UncastRegion().run(seen) == OFF
    assert UncastRegion().run(lambda: (region.run(seen), seen())) == (ON, OFF)
    assert seen() == ON


# -- other code -----------------------------------------------------------------------------------


def test_users_autocast_in_another_thread_follows_torch(region):
    region.enter_ambient()

    def native():
        with torch.autocast("cpu", torch.bfloat16):
            gru = nn.GRU(2, 2)(torch.ones(1, 1, 2))[0].dtype
            return seen(), gru

    alone = in_thread(native)
    region.leave_ambient()
    del region
    assert alone[0] == NATIVE


def test_native_kernel_rules_outside_regions_while_one_replaces_it():
    p, t = torch.full((2,), 0.5, dtype=torch.float16), torch.ones(2, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        before = nn.functional.binary_cross_entropy(p, t)
        region = CastRegion(FP16)
        during = nn.functional.binary_cross_entropy(p, t)
    assert during.dtype is before.dtype
    assert torch.equal(during, before)
    del region


def test_active_dtype_is_that_of_the_ruling_region(region):
    assert active_dtype() is None
    assert region.run(active_dtype) is torch.bfloat16
    assert CastRegion(FP16).run(active_dtype) is torch.float16


# -- kernels and copies ---------------------------------------------------------------------------


def test_kernels_live_as_long_as_the_last_region():
    gc.collect()
    assert not kernel_is_there()
    first, second = CastRegion(BF16), CastRegion(FP16)
    del first
    gc.collect()
    assert kernel_is_there()
    del second
    gc.collect()
    assert not kernel_is_there()
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copy_is_a_region_of_its_own(copied):
    first = CastRegion(BF16)
    second = copied(first)
    del first
    gc.collect()
    assert second.run(seen) == ON
    assert second.spec == BF16


def test_regions_end_in_any_thread():
    holder = [CastRegion(BF16)]
    in_thread(holder.clear)
    gc.collect()
    assert not kernel_is_there()


def test_cache_tag_differs_by_table_and_comes_back():
    config = torch.compiler.config
    config.cache_key_tag = "mine"
    try:
        region = CastRegion(BF16)
        default = config.cache_key_tag
        other = CastRegion(CastSpec(torch.bfloat16, ("cpu",), BF16.table.without("torch", "exp")))
        assert len({"mine", default, config.cache_key_tag}) == 3
        del region, other
        gc.collect()
        assert config.cache_key_tag == "mine"
    finally:
        config.cache_key_tag = ""


# -- weights --------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts casts to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.count += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("ambient", [True, False])
def test_weight_used_twice_in_a_run_is_cast_once(region, ambient):
    if ambient:
        region.enter_ambient()
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2, dtype=torch.bfloat16)
    with Casts() as casts:
        region.run(lambda: layer(layer(x)))
    assert casts.count == 1


def test_weight_used_twice_in_nested_runs_is_cast_once(region):
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2, dtype=torch.bfloat16)
    with Casts() as casts:
        region.run(lambda: region.run(layer, region.run(layer, x)))
    assert casts.count == 1


@pytest.mark.parametrize("ambient", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.fill_(3.0),
        lambda p: p.detach().fill_(3.0),
        lambda p: p.data.copy_(torch.full_like(p, 3.0)),
    ],
)
def test_weight_changed_between_two_runs_is_seen(region, ambient, change):
    if ambient:
        region.enter_ambient()
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    region.run(layer, x)
    change(layer.weight)
    assert region.run(layer, x).item() == 6.0


def test_weight_changed_between_two_ambient_calls_is_seen(region):
    region.enter_ambient()
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    layer(x)
    layer.weight.data.fill_(3.0)
    assert layer(x).item() == 6.0


def test_weight_first_used_without_grad_gets_its_gradient(region):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)

    def both():
        with torch.no_grad():
            layer(x)
        return layer(x)

    region.run(both).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))


def test_no_weight_cache_is_left_on(region):
    region.enter_ambient()
    assert not torch.is_autocast_cache_enabled()
    assert region.run(torch.is_autocast_cache_enabled)
    assert not torch.is_autocast_cache_enabled()


# -- backward -------------------------------------------------------------------------------------


def test_gradients_are_those_of_explicit_casts(region):
    torch.manual_seed(0)
    x, w, scale = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    explicit = w.detach().clone().requires_grad_()

    def fn(w):
        return (torch.layer_norm(torch.softmax(x @ w, 1).exp(), [4]).pow(2) * scale).sum()

    def by_hand(w):
        h = (x.bfloat16() @ w.bfloat16()).float()
        return (torch.layer_norm(torch.softmax(h, 1).exp(), [4]).pow(2) * scale).sum()

    loss = region.run(fn, w)
    with no_casts():
        loss.backward()
    by_hand(explicit).backward()
    torch.testing.assert_close(w.grad, explicit.grad)


@pytest.mark.parametrize("ambient", [True, False], ids=["ambient", "run-only"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_checkpoint_recomputes_in_the_dtypes_of_the_forward(region, ambient, reentrant, where):
    layer, dtypes = nn.Linear(2, 2), []

    def block(x):
        y = torch.exp(layer(x))
        z = nn.functional.layer_norm(layer(y), [2])
        dtypes.append((layer(x).dtype, y.dtype, z.dtype))
        return z

    if ambient:
        region.enter_ambient()
    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        if where == "inside":
            out = region.run(lambda x: checkpoint(block, x, use_reentrant=reentrant), x)
        else:
            out = checkpoint(lambda x: region.run(block, x), x, use_reentrant=reentrant)
        with no_casts():
            out.sum().backward()
    assert dtypes == [(torch.bfloat16, torch.float32, torch.float32)] * 2


def test_plain_backward_under_ambient_casts_keeps_the_dtypes_of_the_forward(region):
    dtypes = []

    class Recording(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            dtypes.append(grad.exp().dtype)
            return grad

    region.enter_ambient()
    Recording.apply(nn.Linear(2, 2)(torch.ones(1, 2))).sum().backward()
    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpoint_under_no_casts_recomputes_without_casts(region, reentrant):
    layer, dtypes = nn.Linear(2, 2), []

    def block(x):
        dtypes.append(layer(x).dtype)
        return layer(x)

    region.enter_ambient()
    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        with no_casts():
            out = checkpoint(lambda x: region.run(block, x), x, use_reentrant=reentrant)
        with no_casts():
            out.sum().backward()
    assert dtypes == [torch.float32] * 2


def test_backward_under_no_casts_in_another_thread_recomputes_in_the_dtypes_of_the_forward(region):
    layer, dtypes = nn.Linear(2, 2), []

    def block(x):
        dtypes.append(torch.exp(layer(x)).dtype)
        return layer(x).exp()

    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = region.run(lambda x: checkpoint(block, x, use_reentrant=False), x)
        in_thread(out.sum().backward)
    assert dtypes == [torch.float32] * 2
    assert layer.weight.grad is not None


# -- float64 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["positional", "keyword"])
def test_double_argument_is_cast_down_by_low_precision_operators(region, given):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.float64)
    out = region.run(layer, x) if given == "positional" else region.run(layer, input=x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, region.run(layer, x.float()))


def test_double_stays_in_fp32_rows_and_promotions(region):
    x = torch.ones(2, dtype=torch.float64)
    assert region.run(torch.exp, x).dtype is torch.float64
    assert region.run(torch.add, x, torch.ones(2)).dtype is torch.float64


def test_doubles_inside_are_cast_once_asked_for(region):
    region.handle_doubles()
    assert region.run(lambda: seen(torch.ones(2, 2, dtype=torch.float64))) == ON


def test_weight_cache_works_with_doubles_handled(region):
    region.handle_doubles()
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2, dtype=torch.bfloat16)
    with Casts() as casts:
        region.run(lambda: layer(layer(x)))
    assert casts.count == 1


def test_native_rows_come_back_when_the_region_that_handled_doubles_ends():
    region = CastRegion(BF16)
    region.handle_doubles()
    del region
    gc.collect()
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="same dtype"):
            x.double() @ x
