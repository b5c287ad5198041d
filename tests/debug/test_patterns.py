"""Formulas that overflow: the trace knows them, and the form that it recommends does not."""

import pytest
import torch
from torch import nn

from apex.debug.overflow import trace_overflow

X = torch.tensor([[0.5, -1.0, 2.0]])


def first_of(function, x):
    net = nn.Linear(3, 3, bias=False)
    nn.init.eye_(net.weight)
    with trace_overflow(net) as trace:
        function(net(x)).float().sum().backward()
    return trace.first


def attention(q, k):
    q, k = q.half(), k.half()
    return ((q @ k.mT) / 3**0.5).softmax(-1)


def scaled_first(q, k):
    q, k = q.half(), k.half()
    return ((q / 3**0.5) @ k.mT).softmax(-1)


def variance(x):
    return x.square().mean(-1) - x.mean(-1).square()


CLOSE = torch.tensor([[1000.0056762695312, 999.9891357421875, 999.9860229492188]])
"""Its variance by a difference of means is negative in fp32."""

LEAST = torch.finfo(torch.float32).min

# pattern, words of the remedy, formula, the recommended one, input
CASES = [
    (
        "a product, as of an attention's scores",
        "scale `q` before the product",
        lambda x: attention(x, x),
        lambda x: scaled_first(x, x),
        torch.full((1, 3), 170.0),
    ),
    (
        "a number below fp16's range, as in a mask",
        "torch.finfo(scores.dtype).min",
        lambda x: (x.half() + torch.full((1, 3), -1e9).half()).softmax(-1) * x,
        lambda x: (x.half() + torch.finfo(torch.float16).min).softmax(-1) * x,
        X,
    ),
    (
        "log of 0",
        "x.log_softmax(dim)",
        lambda x: x.softmax(-1).log(),
        lambda x: x.log_softmax(-1),
        X * 200,
    ),
    (
        "exp of a large number",
        "x.softmax(dim)",
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        lambda x: x.softmax(-1),
        X + 200,
    ),
    (
        "a root of a negative number",
        "squared distance",
        lambda x: ((x * x).sum(-1) + (x * x).sum(-1) - 2.000001 * (x * x).sum(-1)).sqrt(),
        lambda x: torch.cdist(x, x),
        CLOSE,
    ),
    (
        "an addition to a mask of the least number",
        "masked_fill",
        lambda x: ((x * 0 + LEAST) + LEAST).softmax(-1) * x,
        lambda x: x.masked_fill(x < 9, LEAST).masked_fill(x < 9, LEAST).softmax(-1) * x,
        X,
    ),
    (
        "a power of a negative number",
        "fractional exponent",
        lambda x: x**0.3,
        lambda x: x.abs() ** 0.3,
        X,
    ),
    (
        "log of 0 in fp16",
        "x.float().clamp_min(1e-12)",
        lambda x: (x.half().exp() * 1e-4 * 1e-4).log(),
        lambda x: (x.exp() * 1e-4 * 1e-4).clamp_min(1e-12).log(),
        X,
    ),
    (
        "an inverse function at the end of its domain",
        "x.clamp(-1 + eps, 1 - eps)",
        lambda x: (x * 1.000001).acos(),
        lambda x: (x * 1.000001).clamp(-1 + 1e-6, 1 - 1e-6).acos(),
        torch.ones(1, 3),
    ),
    (
        "the derivative of a root at 0",
        "torch.linalg.vector_norm",
        lambda x: x.square().sum(-1).sqrt(),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        X * 0,
    ),
    (
        "division by a tiny number",
        "a / b.clamp_min(eps)",
        lambda x: x / (x * 0 + 1e-39),
        lambda x: x / (x * 0 + 1e-6),
        X,
    ),
    (
        "a square or a sum in fp16",
        "x.float()",
        lambda x: x.half().pow(2).mean(-1).float(),
        lambda x: x.float().pow(2).mean(-1),
        X * 300,
    ),
]


@pytest.mark.parametrize(("pattern", "words", "formula", "better", "x"), CASES)
def test_a_known_formula_is_named_with_the_form_that_works(pattern, words, formula, better, x):
    first = first_of(formula, x)
    assert first is not None
    assert first.pattern == pattern, first
    assert words in first.remedy
    assert (f" This is {pattern}." in str(first)) == bool(pattern)
    assert first_of(better, x) is None


def test_a_power_is_a_division_where_its_base_is_0_and_undefined_where_it_is_negative():
    x = torch.tensor([[-1.0, 0.0, 1.0]])
    zero, negative = first_of(lambda x: x**-1, x), first_of(lambda x: x**0.5, x)
    assert (zero.cause, zero.pattern) == ("division by zero", "")
    assert (negative.cause, negative.pattern) == ("domain", "a power of a negative number")


def test_a_wider_dtype_is_no_remedy_for_what_exceeds_it_too():
    for largest, is_wider in ((20.0, True), (200.0, False), (2000.0, False)):
        first = first_of(lambda x, top=largest: (x.half() * 0 + top).exp(), X)
        assert first.pattern == "exp of a large number"
        assert ("bf16" in first.remedy) == is_wider, first.remedy


def test_a_cast_of_large_numbers_is_no_mask():
    first = first_of(lambda x: (x * 1e6).half().softmax(-1), torch.tensor([[1.0, 2.0, 3.0]]))
    assert (first.op, first.cause, first.pattern) == ("aten._to_copy", "range", "")


# words of the remedy, formula, what the words say
