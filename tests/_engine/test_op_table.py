"""Every function of apex's lists, by every input and on every device, against explicit casts."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import Tensor

from apex._core.oplists import CastSpec, OpTable
from apex._engine.casting import CastRegion
from tests._engine.op_calls import HOLDERS, Call, calls, convert, tensor_dtypes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW = [torch.bfloat16, torch.float16]
# Inside these, part of the arithmetic is in the input's dtype (see OpTable): dtype exact, value near.
NEAR = {"local_response_norm", "multilabel_soft_margin_loss", "normalize"}
OPERATORS = {
    name: getattr(operator, name)
    for name in "__matmul__ __pow__ __add__ __mul__ __sub__ __truediv__ __eq__ __ge__ __gt__".split()
} | {name: getattr(operator, name) for name in "__le__ __lt__ __ne__".split()}
# Names of Python 2 that apex still lists and torch's Tensor no longer has.
GONE = {name for name in ("__div__", "__rdiv__", "__idiv__") if getattr(Tensor, name, None) is None}


@functools.cache
def region(dtype: torch.dtype, device: str) -> CastRegion:
    return CastRegion(CastSpec(dtype, (device,), OpTable.default()))


def inputs(call: Call, mode: str, low: torch.dtype, device: str):
    dtypes = {"fp32": [torch.float32], "low": [low], "mixed": [low, torch.float32]}[mode]
    return convert(call.args, *dtypes, device=device)


def wanted(call: Call, args, low: torch.dtype) -> torch.dtype:
    found = tensor_dtypes(args)
    if call.category == "half":
        return low
    if call.category in {"float", "banned"}:
        return torch.float32
    return functools.reduce(torch.promote_types, found)


def invoke(call: Call):
    return OPERATORS.get(call.name, getattr(HOLDERS[call.namespace], call.name))


def check(call: Call, mode: str, low: torch.dtype, device: str) -> None:
    args = inputs(call, mode, low, device)
    dtype = wanted(call, args, low)
    got = region(low, device).run(invoke(call), *args, **call.kwargs)
    expected = invoke(call)(*convert(args, dtype, device=device), **call.kwargs)
    if not isinstance(expected, Tensor):
        assert got == expected
        return
    assert got.dtype is expected.dtype
    assert expected.dtype in {dtype, torch.bool}
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if call.name in NEAR else {}
    torch.testing.assert_close(got, expected, **tolerance)


def is_in_place(call: Call) -> bool:
    return call.name in {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"}


def table() -> list:
    found = []
    for call in calls():
        if call.name in GONE or is_in_place(call):
            continue
        for mode in ("fp32", "low", "mixed"):
            if mode == "mixed" and len(tensor_dtypes(call.args)) < 2:
                continue
            found.append(pytest.param(call, mode, id=f"{call.namespace}.{call.name}-{mode}"))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize(("call", "mode"), table())
def test_result_is_that_of_explicit_casts(call, mode, low, device):
    if call.category == "banned" and low is torch.float16 and mode != "fp32":
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            region(low, device).run(invoke(call), *inputs(call, mode, low, device))
        return
    check(call, mode, low, device)
