"""Cast regions: where casts are on, in which thread, and what is left when they end."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from apex._core.op_table import AutocastSpec, OpTable
from apex._engine.autocast.ambient import end_stale_casts
from apex._engine.autocast.region import AutocastRegion, NoAutocastRegion, active_dtype, casts_off
from apex._torch.dispatcher import weight_cache_is_safe
from tests.support.loops import in_a_thread

BF16 = AutocastSpec(torch.bfloat16, ("cpu",), OpTable.default())
FP16 = AutocastSpec(torch.float16, ("cpu",), OpTable.default())


def state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = state()
    yield
    gc.collect()
    end_stale_casts()
    assert state() == before


@pytest.fixture
def region():
    region = AutocastRegion(BF16)
    yield region
    region.end()


def seen():
    """Returns the dtypes that a matmul (torch's row) and exp of bf16 (a filled row) give here."""
    x = torch.ones(2, 2)
    return (x @ x).dtype, torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype


ON = (torch.bfloat16, torch.float32)
OFF = (torch.float32, torch.bfloat16)


# -- run ------------------------------------------------------------------------------------------


def test_run_leaves_no_trace_after_an_exception(region):
    before = state()

    def fail():
        raise KeyError("inside")

    with pytest.raises(KeyError):
        region.run(fail)
    assert state() == before
    assert active_dtype() is None
    assert region.run(seen) == ON


def test_users_autocast_off_inside_a_run_is_respected(region):
    def off():
        with torch.autocast("cpu", enabled=False):
            return seen()

    assert region.run(off) == OFF


def test_device_type_without_autocast_is_refused():
    with pytest.raises(ValueError, match=r"meta.*cpu, cuda, xpu, mps.*O2"):
        AutocastRegion(AutocastSpec(torch.float16, ("meta",), OpTable.default()))


# -- ambient --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("block", ["cpu", "cuda"])
def test_ambient_casts_do_not_begin_in_a_block(region, block):
    with torch.autocast(block, torch.float16, enabled=False):
        region.begin_ambient()
        assert seen() == OFF
        assert region.run(seen) == ON
    assert seen() == OFF
    assert region.run(seen) == ON


def test_ambient_that_ends_inside_a_run_is_off_after_it(region):
    region.begin_ambient()
    region.run(region.end)
    end_stale_casts()  # an amp call
    assert seen() == OFF


@pytest.mark.parametrize("ends", ["left", "region gone"])
@pytest.mark.parametrize("where", ["here", "forward", "amp call"])
def test_ambient_that_ended_in_another_thread_is_off_at_the_next_forward_or_call(ends, where):
    holder = [AutocastRegion(BF16)]
    holder[0].begin_ambient()

    def end():
        if ends == "left":
            holder[0].end()
        holder.clear()
        gc.collect()

    if where == "here":
        end()
    else:
        in_a_thread(end)
    if where == "forward":
        assert AutocastRegion(FP16).run(torch.ones, 1).dtype is torch.float32
    elif where == "amp call":
        end_stale_casts()
    assert seen() == OFF
    assert torch.compiler.config.cache_key_tag == ""


# -- off, and the user's own autocast -------------------------------------------------------------


@pytest.mark.parametrize("ambient", [True, False])
def test_casts_off_turns_casts_and_regions_off_and_back_on(region, ambient):
    if ambient:
        region.begin_ambient()
    with casts_off():
        with casts_off():
            assert seen() == OFF
        assert seen() == region.run(seen) == OFF
        assert active_dtype() is None
    assert seen() == (ON if ambient else OFF)
    assert region.run(seen) == ON


def test_uncast_region_is_off_inside_and_a_cast_region_in_it_on(region):
    region.begin_ambient()
    assert NoAutocastRegion().run(seen) == OFF
    assert NoAutocastRegion().run(lambda: (region.run(seen), seen())) == (ON, OFF)
    assert seen() == ON


def test_users_autocast_follows_the_table_while_a_region_of_its_dtype_lives(region):
    with torch.autocast("cpu", torch.bfloat16):
        assert seen() == ON
    with torch.autocast("cpu", torch.float16):  # another dtype: torch's own
        assert seen() == (torch.float16, torch.bfloat16)


# -- weights --------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts casts to bf16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.count += 1
        return func(*args, **kwargs)


@pytest.mark.skipif(not weight_cache_is_safe, reason="the weight cache loses gradients: it is off")
@pytest.mark.parametrize("ambient", [True, False])
def test_weight_used_twice_in_a_run_is_cast_once(region, ambient):
    if ambient:
        region.begin_ambient()
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2, dtype=torch.bfloat16)
    with Casts() as casts:
        region.run(lambda: nn.functional.linear(nn.functional.linear(x, weight), weight))
    assert casts.count == 1
    assert torch.is_autocast_cache_enabled() is not ambient  # it would miss changes outside of runs


def test_weight_first_used_without_grad_gets_its_gradient(region):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)

    def both():
        with torch.no_grad():
            layer(x)
        return layer(x)

    region.run(both).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))


# -- recomputes -----------------------------------------------------------------------------------

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])


@REENTRANT
def test_casts_that_a_checkpointed_function_turns_off_are_off_in_another_thread(region, reentrant):
    """autograd's device threads recompute, and have no casts of their own."""
    layer, seen_dtypes = nn.Linear(2, 2), []

    def block(x):
        with casts_off():
            y = layer(x)
            seen_dtypes.append((y.dtype, active_dtype()))
        return layer(y)

    region.begin_ambient()
    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = checkpoint(block, x, use_reentrant=reentrant)
        in_a_thread(out.float().sum().backward)
    assert seen_dtypes == [(torch.float32, None)] * 2
