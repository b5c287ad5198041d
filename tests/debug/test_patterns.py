"""Which formula a trace takes an overflow for; test_remedies.py shows that the remedies cure."""

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
