"""Every function of apex's lists, by every input and on every device, against explicit casts."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import Tensor

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.region import CastRegion
from tests._engine.op_calls import HOLDERS, Call, calls, convert, tensor_dtypes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW = [torch.bfloat16, torch.float16]
# Part of their arithmetic is in the input's dtype (see OpTable): exact dtype, near value.
NEAR = {"local_response_norm", "multilabel_soft_margin_loss", "normalize"}
OPERATORS = {
    name: getattr(operator, name)
    for name in [
        "__matmul__",
        "__pow__",
        "__add__",
        "__mul__",
        "__sub__",
        "__truediv__",
        "__eq__",
        "__ge__",
        "__gt__",
    ]
} | {name: getattr(operator, name) for name in ["__le__", "__lt__", "__ne__"]}
# Names of Python 2 that apex still lists and torch's Tensor no longer has.
GONE = {name for name in ("__div__", "__rdiv__", "__idiv__") if getattr(Tensor, name, None) is None}


@functools.cache
def region(dtype: torch.dtype, device: str) -> CastRegion:
    return CastRegion(CastSpec(dtype, (device,), OpTable.default()))


@pytest.fixture(autouse=True, scope="module")
def end_regions():
    """Ends the regions with this module: their kernels are process-wide."""
    yield
    region.cache_clear()


def inputs(call: Call, mode: str, low: torch.dtype, device: str):
    dtypes = {"fp32": [torch.float32], "low": [low], "mixed": [low, torch.float32]}[mode]
    return convert(call.args, *dtypes, device=device)


def wanted(call: Call, args, low: torch.dtype) -> torch.dtype:
    found = tensor_dtypes(args)
    if call.category == "half":
        return low
    # torch writes 1 / x as x.reciprocal() * 1, and reciprocal is an fp32 row.
    if call.category in {"float", "banned"} or call.name in {"__rdiv__", "__rtruediv__"}:
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


IN_PLACE = {name: getattr(operator, name) for name in ["__iadd__", "__isub__", "__imul__"]} | {
    "__itruediv__": operator.itruediv,
    "__idiv__": operator.itruediv,
}


def table() -> list:
    found = []
    for call in calls():
        if call.name in GONE or call.name in IN_PLACE or call.name == "__ipow__":
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_in_place_arithmetic_keeps_the_dtype_of_self(name, low, device):
    for own, other in ((low, torch.float32), (torch.float32, low)):
        x, y = (torch.full((2,), 1.5, dtype=dtype, device=device) for dtype in (own, other))
        result = region(low, device).run(IN_PLACE[name], x, y)
        assert result is x
        assert x.dtype is own


def in_place_fp32_ops() -> list[str]:
    return [op for op, category in OpTable.default().rows.items() if category == "fp32_inplace"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("op", in_place_fp32_ops())
def test_in_place_fp32_op_on_low_precision_raises_and_on_fp32_works(op, low, device):
    name, _, _overload = op.partition(".")
    rest = {
        "pow_.Scalar": (2.0,),
        "pow_.Tensor": (torch.ones(2, device=device),),
        "cumsum_": (0,),
        "cumprod_": (0,),
        "renorm_": (2, 0, 1.0),
    }.get(op, ())
    shape = (2, 2) if name == "renorm_" else (2,)
    for dtype in (low, torch.float32):
        x = torch.full(shape, 0.5, dtype=dtype, device=device)
        if dtype is low:
            with pytest.raises(NotImplementedError, match=f"In-place {name} got a .*fp32"):
                region(low, device).run(getattr(x, name), *rest)
            assert torch.equal(x, torch.full_like(x, 0.5))
        else:
            assert region(low, device).run(getattr(x, name), *rest) is x


@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
def test_in_place_power_operator_raises_on_low_precision(low):
    with pytest.raises(NotImplementedError, match="In-place pow_"):
        region(low, "cpu").run(operator.ipow, torch.ones(2, dtype=low), 2)


def test_every_name_of_the_lists_is_called_in_this_table():
    # Arithmetic of Python 2 is the one thing that may be missing, with the torch that drops it.
    called = {(param.values[0].namespace, param.values[0].name) for param in table()}
    skipped = {("torch.Tensor", name) for name in {*IN_PLACE, "__ipow__", *GONE}}
    assert {(call.namespace, call.name) for call in calls()} == called | skipped
