"""Every row of the op table by its operator: the same dtypes and values on every device.

The CPU and CUDA have values. Of XPU and MPS it is checked what the dispatcher would run: their
autocast keys cast fake tensors as they would cast a device's.
"""

import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from apex._core.op_rows import COVERED_INSIDE, NATIVE_DIFFERENCES
from apex._core.op_table import OpTable
from apex._engine.autocast.kernels import native_category
from apex._torch import dispatcher
from tests.casts import op_rows
from tests.casts.op_rows import MPS, arguments, called, convert, floating, mixes, placed, rows

FP32 = torch.float32
LOW = [torch.bfloat16, torch.float16]
CATEGORY = OpTable.default().rows

# Their fake tensors ask for a kernel of the device's. torch has one source for CUDA's and XPU's.
ONLY_ON_A_DEVICE = {("scaled_dot_product_attention", device) for device in ("xpu", "mps")}
ONLY_ON_A_DEVICE |= {("gru_cell", "xpu")}
ON_OTHERS = [
    (row, device)
    for device in ("xpu", "mps")
    for row in rows()
    if (row, device) not in ONLY_ON_A_DEVICE
]
# Before any region lives: where torch's own kernel, or an inner row, casts as the table says.
KEPT = {
    (row, device)
    for row, device in ON_OTHERS
    if native_category(row, device) is not None or row in COVERED_INSIDE
    if row not in NATIVE_DIFFERENCES[device]
}
# In C++, torch 2.15 warns of old and new operators, and of those that only saved programs call.
IGNORES = pytest.mark.filterwarnings("ignore:(?s).*Triggered internally:UserWarning")


region = functools.cache(op_rows.region_of)


@pytest.fixture(autouse=True, scope="module")
def end_regions():
    yield
    region.cache_clear()


def wanted(row, dtypes, low, device="cpu"):
    """Returns the dtype that a call computes in; None where it raises."""
    category = CATEGORY[row]
    if row == "conv_transpose3d.input" and device == "mps":  # which has no 16-bit kernel for it
        return FP32
    if category in ("low_precision", "recurrent"):
        return low
    if category == "destination":
        return dtypes[0]
    if category == "promote":
        return functools.reduce(torch.promote_types, dtypes)
    if category == "fp32_inplace" and dtypes[0] is low:
        return None
    if category == "banned" and torch.float16 in dtypes:
        return None
    return FP32


def check(row, device):
    for args, kwargs in arguments(row):
        for low, dtypes in [(each, given) for each in LOW for given in mixes(args, each)]:
            given = placed(row, convert(args, *dtypes), device)
            dtype = wanted(row, dtypes, low)
            if dtype is None:
                with pytest.raises(NotImplementedError, match=row.partition(".")[0]):
                    region(low, device).run(called, row, given, kwargs)
                continue
            got = region(low, device).run(called, row, given, kwargs)
            expected = called(row, placed(row, convert(given, dtype), device), kwargs)
            if not isinstance(expected, Tensor | tuple | list):
                assert got == expected, row
                continue
            for one, other in zip(floating([got]), floating([expected]), strict=True):
                assert one.dtype is other.dtype is dtype, row
            torch.testing.assert_close(got, expected, msg=row)


@pytest.mark.parametrize("category", sorted({*CATEGORY.values()}))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@IGNORES
def test_a_row_is_its_operator_on_explicitly_cast_arguments(device, category):
    for row in rows(device):
        if CATEGORY[row] == category:
            check(row, device)


def faked(args, device):
    return tree_map_only(Tensor, functools.partial(torch.empty_like, device=device), args)


def called_on(device, row, args, kwargs):
    """Runs the autocast kernel that a call on the device would run.

    torch's own casts tensors of its device only, fake ones too. Ours casts any, so that those of
    the CPU give values; its key is put on them.
    """
    if (row, device) in KEPT:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return called(row, faked(args, device), kwargs)
    key = getattr(torch._C.DispatchKey, dispatcher.AUTOCAST_KEYS[device])
    with torch._C._IncludeDispatchKeyGuard(key):
        return called(row, args, kwargs)


@pytest.mark.parametrize("device", ["xpu", MPS])
@IGNORES
def test_a_row_has_the_same_dtypes_on_other_devices(device):
    low = torch.bfloat16
    for row in (row for row, where in ON_OTHERS if where == device):
        for args, kwargs in arguments(row):
            for dtypes in mixes(args, low):
                given, dtype = convert(args, *dtypes), wanted(row, dtypes, low, device)
                if dtype is None:
                    with pytest.raises(NotImplementedError, match=row.partition(".")[0]):
                        region(low, device).run(called_on, device, row, given, kwargs)
                    continue
                try:
                    got = region(low, device).run(called_on, device, row, given, kwargs)
                except RuntimeError as error:
                    if "is not linked with support for" not in str(error):
                        raise
                    continue  # fake tensors of this torch ask for a driver
                assert {tensor.dtype for tensor in floating([got])} <= {dtype}, row
                assert floating([got]) or isinstance(got, bool) or not got.is_floating_point(), row


def test_every_row_is_called():
    elsewhere = {row for row in CATEGORY if row.endswith(".out")} | op_rows.NO_KERNEL
    assert set(rows()) == CATEGORY.keys() - elsewhere
