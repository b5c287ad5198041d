"""Every row of the op table by its operator: the same dtypes and values on every device.

The CPU and CUDA have values. Of XPU and MPS it is checked what the dispatcher would run: their
autocast keys cast fake tensors as they would cast a device's.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from apex._core.op_table import DEVICE_LIMITS, CastSpec, OpTable
from apex._engine.autocast.region import CastRegion
from apex._torch import dispatcher
from tests._engine.op_calls import convert
from tests._engine.op_rows import arguments, floating, rows

FP32 = torch.float32
LOW = [torch.bfloat16, torch.float16]
CATEGORY = OpTable.default().rows

# They read values. Their kernels are ours on XPU and MPS, and take tensors of the CPU.
NOT_FAKED = {"equal", "ctc_loss.IntList", "ctc_loss.Tensor", "grid_sampler", "gru.input"}
NOT_FAKED |= {row for row in rows() if row.endswith(".data")}
# torch's own kernels, the same source for CUDA and XPU, which ask for a kernel of the device's.
ONLY_ON_A_DEVICE = {("scaled_dot_product_attention", device) for device in ("xpu", "mps")}
ONLY_ON_A_DEVICE |= {("gru_cell", "xpu")}
ON_OTHERS = [
    (row, device)
    for device in ("xpu", "mps")
    for row in rows()
    if (row, device) not in ONLY_ON_A_DEVICE
]


@functools.cache
def region(low):
    return CastRegion(CastSpec(low, ("cpu", "cuda", "xpu", "mps"), OpTable.default()))


@pytest.fixture(autouse=True, scope="module")
def end_regions():
    yield
    region.cache_clear()


def mixes(args, low):
    """Yields the dtypes that the call's tensors are given, the last repeated."""
    yield from ([FP32], [low])
    if len(floating(args)) > 1:
        yield from ([low, FP32], [FP32, low])


def wanted(row, dtypes, low, device="cpu"):
    """Returns the dtype that a call computes in; None where it raises."""
    category = DEVICE_LIMITS.get(device, {}).get(row, CATEGORY[row])
    if category in ("low_precision", "recurrent"):
        return low
    if category == "low_precision_inplace":
        return dtypes[0]
    if category == "promote":
        return functools.reduce(torch.promote_types, dtypes)
    if category == "fp32_inplace" and dtypes[0] is low:
        return None
    if category == "banned" and torch.float16 in dtypes:
        return None
    return FP32


def called(row, args, kwargs):
    """Calls the operator, or in place on a copy of its first argument."""
    if CATEGORY[row].endswith("_inplace"):
        args = (args[0].clone(), *args[1:])
        result = dispatcher.overload(row)(*args, **kwargs)
        assert result is args[0]
        return result
    return dispatcher.overload(row)(*args, **kwargs)


def check(row, device):
    for args, kwargs in arguments(row):
        for low, dtypes in [(each, given) for each in LOW for given in mixes(args, each)]:
            given = placed(row, convert(args, *dtypes), device)
            dtype = wanted(row, dtypes, low)
            if dtype is None:
                with pytest.raises(NotImplementedError, match=row.partition(".")[0]):
                    region(low).run(called, row, given, kwargs)
                continue
            got = region(low).run(called, row, given, kwargs)
            expected = called(row, placed(row, convert(given, dtype), device), kwargs)
            assert_same(got, expected, dtype)


def placed(row, args, device):
    """Returns the arguments on a device, but the lengths of packed sequences on the host."""
    there = tree_map_only(Tensor, lambda tensor: tensor.to(device), args)
    return (there[0], args[1].cpu(), *there[2:]) if row.endswith(".data") else there


def assert_same(got, expected, dtype):
    if not isinstance(expected, Tensor | tuple):
        assert got == expected
        return
    for one, other in zip(floating([got]), floating([expected]), strict=True):
        assert one.dtype is other.dtype is dtype
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("row", rows())
def test_a_row_is_its_operator_on_explicitly_cast_arguments(row):
    check(row, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("row", rows())
def test_a_row_on_cuda_is_its_operator_on_explicitly_cast_arguments(row):
    check(row, "cuda")


def faked(args, device):
    return tree_map_only(
        Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device), args
    )


def called_on(device, row, args, kwargs):
    """Calls the operator with fake tensors of the device, or else its autocast kernel."""
    if row not in NOT_FAKED:
        return called(row, faked(args, device), kwargs)
    kernel = dispatcher.autocast_kernel(row, device)
    return kernel.call_boxed(torch._C._dispatch_keys(args[0]), *args, **kwargs)


@pytest.mark.parametrize(("row", "device"), ON_OTHERS)
def test_a_row_has_the_same_dtypes_on_other_devices(row, device):
    low = torch.bfloat16
    fakes = row not in NOT_FAKED
    for args, kwargs in arguments(row):
        for dtypes in mixes(args, low):
            dtype = wanted(row, dtypes, low, device)
            raises = pytest.raises(NotImplementedError, match=row.partition(".")[0])
            with (
                FakeTensorMode(allow_non_fake_inputs=True) if fakes else contextlib.nullcontext(),
                raises if dtype is None else contextlib.nullcontext(),
            ):
                got = region(low).run(called_on, device, row, convert(args, *dtypes), kwargs)
                assert {tensor.dtype for tensor in floating([got])} <= {dtype}
                assert floating([got]) or got is True


def test_every_row_is_called():
    assert set(rows()) == CATEGORY.keys() - {"to.dtype_layout"}
    absent = [row for row in rows() if not dispatcher.has_operator(f"aten::{row}")]
    assert not absent
