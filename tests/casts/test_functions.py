"""Every function of apex's lists against explicit casts: one test each, for all its inputs."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
from torch import Tensor

from apex._core.op_rows import INTO_PRODUCTS
from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.region import CastRegion
from tests.casts.op_calls import HOLDERS, Call, calls, convert, tensor_dtypes

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


def row_calls() -> list[Call]:
    skipped = {*IN_PLACE, "__ipow__", "cpu", *GONE}
    return [call for call in calls() if call.name not in skipped]


def check_row(call: Call, device: str) -> None:
    for low, mode in itertools.product(LOW, ("fp32", "low", "mixed")):
        if mode == "mixed" and len(tensor_dtypes(call.args)) < 2:
            continue
        if call.category == "banned" and low is torch.float16 and mode != "fp32":
            with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
                region(low, device).run(invoke(call), *inputs(call, mode, low, device))
            continue
        check(call, mode, low, device)


@pytest.mark.parametrize("call", row_calls(), ids=lambda call: f"{call.namespace}.{call.name}")
def test_result_is_that_of_explicit_casts(call):
    check_row(call, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("call", row_calls(), ids=lambda call: f"{call.namespace}.{call.name}")
def test_result_on_cuda_is_that_of_explicit_casts(call):
    check_row(call, "cuda")


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_in_place_arithmetic_keeps_the_dtype_of_self(name, device):
    for low in LOW:
        for own, other in ((low, torch.float32), (torch.float32, low)):
            x, y = (torch.full((2,), 1.5, dtype=dtype, device=device) for dtype in (own, other))
            result = region(low, device).run(IN_PLACE[name], x, y)
            assert result is x
            assert x.dtype is own


def ops_of(category: str) -> list[str]:
    return [op for op, own in OpTable.default().rows.items() if own == category]


_PRODUCTS = INTO_PRODUCTS.split()


@DEVICES
@pytest.mark.parametrize("op", [op for op in _PRODUCTS if not op.endswith(".out")])
def test_in_place_product_casts_its_arguments_to_self(op, device):
    (call,) = (c for c in calls() if (c.namespace, c.name) == ("torch.Tensor", op.rstrip("_")))
    for low, own in itertools.product(LOW, (torch.float32, "low")):
        dtype = low if own == "low" else own
        x, *rest = convert(call.args, dtype, low, torch.float32, device=device)
        expected = getattr(x.clone(), op)(*convert(rest, dtype, device=device))
        assert region(low, device).run(getattr(x, op), *rest) is x
        assert x.dtype is dtype
        torch.testing.assert_close(x, expected)


@DEVICES
@pytest.mark.parametrize("op", [op for op in _PRODUCTS if op.endswith(".out")])
def test_product_with_out_casts_its_arguments_to_out(op, device):
    name = op.removesuffix(".out")
    (call,) = (c for c in calls() if (c.namespace, c.name) == ("torch", name))
    for low, own in itertools.product(LOW, (torch.float32, "low")):
        dtype = low if own == "low" else own
        args = convert(call.args, low, torch.float32, device=device)
        expected = getattr(torch, name)(*convert(args, dtype, device=device))
        out = torch.empty_like(expected)
        assert region(low, device).run(getattr(torch, name), *args, out=out) is out
        assert out.dtype is dtype
        torch.testing.assert_close(out, expected)


@DEVICES
@pytest.mark.parametrize("op", ops_of("fp32_inplace"))
def test_in_place_fp32_op_on_low_precision_raises_and_on_fp32_works(op, device):
    name, _, _overload = op.partition(".")
    rest = {
        "pow_.Scalar": (2.0,),
        "pow_.Tensor": (torch.ones(2, device=device),),
        "cumsum_": (0,),
        "cumprod_": (0,),
        "renorm_": (2, 0, 1.0),
    }.get(op, ())
    shape = (2, 2) if name == "renorm_" else (2,)
    for low in LOW:
        x = torch.full(shape, 0.5, dtype=low, device=device)
        with pytest.raises(NotImplementedError, match=f"In-place {name} got a .*fp32"):
            region(low, device).run(getattr(x, name), *rest)
        assert torch.equal(x, torch.full_like(x, 0.5))
        x = x.float()
        assert region(low, device).run(getattr(x, name), *rest) is x


@DEVICES
@pytest.mark.parametrize("exponent", [2, 2.5, "low", torch.float32])
def test_in_place_power_operator_gives_a_new_fp32_tensor(exponent, device):
    for low in LOW:
        x = torch.full((2,), 300.0, dtype=low, device=device)  # whose square fp16 cannot hold
        by = exponent
        if not isinstance(exponent, (int, float)):
            by = torch.tensor([2.0, 3.0], dtype=low if exponent == "low" else exponent).to(device)
        before = x
        x = region(low, device).run(operator.ipow, x, by)
        assert x.dtype is torch.float32
        torch.testing.assert_close(
            x, before.float() ** (by.float() if isinstance(by, Tensor) else by)
        )
        assert before.dtype is low
        assert torch.equal(before, torch.full_like(before, 300.0))


@DEVICES
def test_in_place_power_operator_writes_into_an_fp32_tensor(device):
    for low in LOW:
        x = torch.full((2,), 3.0, device=device)
        assert region(low, device).run(operator.ipow, x, 2) is x
        assert x.tolist() == [9.0, 9.0]


def test_every_name_of_the_lists_is_called_in_this_table():
    # Arithmetic of Python 2 is the one thing that may be missing, with the torch that drops it.
    called = {(call.namespace, call.name) for call in row_calls()}
    skipped = {("torch.Tensor", name) for name in {*IN_PLACE, "__ipow__", "cpu", *GONE}}
    assert {(call.namespace, call.name) for call in calls()} == called | skipped
