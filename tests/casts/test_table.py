"""The op table gives every function of apex's lists the dtypes of its category."""

import functools
import operator

import pytest
import torch

from apex._core import op_rows
from apex._core.op_table import OpTable
from tests.casts.op_calls import HOLDERS, calls
from tests.casts.op_rows import convert, mixes, region_of

FP16, FP32 = torch.float16, torch.float32
COMPARISONS = {"eq", "equal", "ge", "gt", "le", "lt", "ne"}
NOT_IN_EVERY_TORCH = {
    *("_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa.vec"),  # after 2.11
    "_grouped_mm",  # from 2.8
    *("linalg_matrix_sqrth", "linalg_polar"),  # from 2.15
    *("cholesky", "qr"),  # until 2.14
}


def function(call):
    """Returns the function of a call; None where torch does not have it."""
    if call.name.startswith("__") and (own := getattr(operator, call.name, None)):
        return own
    return getattr(HOLDERS[call.namespace], call.name, None)


def wanted(call, dtypes, low):
    """Returns the dtype of the result; None where the call is refused."""
    name = call.name.strip("_")
    if name in COMPARISONS:
        return torch.bool
    if name in ("rdiv", "rtruediv"):  # which torch makes of a reciprocal
        return FP32
    if name == "cpu" or (call.category == "promote" and call.name.startswith("__i")):
        return dtypes[0]
    if call.category == "half":
        return low
    if call.category == "float":
        return FP32
    if call.category == "banned":
        return None if FP16 in dtypes else FP32
    return functools.reduce(torch.promote_types, dtypes)


@pytest.mark.parametrize("low", [torch.bfloat16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_function_of_apexs_lists_has_the_dtypes_of_its_category(device, low):
    region = region_of(low, device)
    for call in calls():
        fn = function(call)
        for dtypes in mixes(call.args, low) if fn is not None else ():
            args = convert(call.args, *dtypes, device=device)
            expected = wanted(call, dtypes, low)
            if expected is None:
                with pytest.raises(NotImplementedError, match=call.name):
                    region.run(fn, *args)
                continue
            result = region.run(fn, *args)
            found = torch.bool if isinstance(result, bool) else result.dtype
            assert found is expected, (call.name, dtypes)


def test_every_row_names_an_operator_of_this_torch():
    named = {op for ops in op_rows.ROWS.values() for op in ops.split()}
    assert named - OpTable.default().rows.keys() <= NOT_IN_EVERY_TORCH


def test_in_place_operators_of_a_name_keep_the_dtype_that_they_write():
    table = OpTable.default().with_("torch.Tensor", "relu_", "fp32")
    table = table.with_("torch.Tensor", "__iadd__", "promote")
    assert (table.rows["relu_"], table.rows["add_.Tensor"]) == ("fp32_inplace", "destination")
