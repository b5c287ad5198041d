"""Operators that write: products with ``out=``, and the in-place power."""

import operator

import pytest
import torch
from torch import Tensor

from apex._core.op_rows import PRODUCTS
from tests.casts.op_calls import calls
from tests.casts.op_rows import convert, region_of
from tests.support.loops import each_of

device = each_of("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
low = each_of(torch.bfloat16, torch.float16, ids=["bf16", "fp16"])


def run(low, device, fn, *args, **kwargs):
    return region_of(low, device).run(fn, *args, **kwargs)


def test_a_product_with_out_casts_its_arguments_to_out(low, device):
    for name in PRODUCTS.split():
        (call,) = (c for c in calls() if (c.namespace, c.name) == ("torch", name))
        for dtype in (torch.float32, low):
            args = convert(call.args, low, torch.float32, device=device)
            expected = getattr(torch, name)(*convert(args, dtype, device=device))
            out = torch.empty_like(expected)
            assert run(low, device, getattr(torch, name), *args, out=out) is out
            assert out.dtype is dtype
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("exponent", [2.5, "low", torch.float32])
def test_the_in_place_power_operator_gives_a_new_fp32_tensor(low, device, exponent):
    before = torch.full((2,), 300.0, dtype=low, device=device)  # whose square fp16 cannot hold
    by = exponent
    if not isinstance(exponent, float):
        by = torch.tensor([2.0, 3.0], dtype=low if exponent == "low" else exponent).to(device)
    x = run(low, device, operator.ipow, before, by)
    assert x.dtype is torch.float32
    exact = by.float() if isinstance(by, Tensor) else by
    torch.testing.assert_close(x, before.float() ** exact)
    assert torch.equal(before, torch.full_like(before, 300.0))


def test_the_in_place_power_operator_writes_into_an_fp32_tensor(low, device):
    x = torch.full((2,), 3.0, device=device)
    assert run(low, device, operator.ipow, x, 2) is x
    assert x.tolist() == [9.0, 9.0]
