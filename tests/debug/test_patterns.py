"""Which formula a trace takes an overflow for; test_remedies.py shows that the remedies cure."""

import torch
from torch import nn

from apex.debug.overflow import trace_overflow
from tests.debug.bodies import Body
from tests.support.loops import prepared
from tests.support.memory import new_memory_holds_nan

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
    assert first.why == "the true result exceeds the range of float16 (65504)."


def squares(net, *others):
    """Traces a model at O2 that squares 300."""
    net, _ = prepared("O2", model=net)
    nn.init.constant_(net[0].weight, 100.0)
    nn.init.zeros_(net[0].bias)
    with trace_overflow(*others, net) as trace:
        net(torch.ones(1, 3))
    return trace.first


def test_the_module_to_keep_in_fp32_is_named_without_its_model_and_holds_what_reads_the_values():
    square, divide = Body(lambda self, x: x.square()), Body(lambda self, x: x / 300.0)
    for others, module in ((), "1.0"), ((nn.Linear(3, 3),), "Sequential:1.0"):
        first = squares(nn.Sequential(nn.Linear(3, 3), nn.Sequential(square, divide)), *others)
        assert first.module == module
        assert first.remedies[1].endswith("fp32_modules=['1']")


def test_neither_a_cast_of_large_numbers_nor_a_gradient_is_a_mask():
    first = first_of(lambda x: (x * 1e6).half().softmax(-1), torch.tensor([[1.0, 2.0, 3.0]]))
    assert (first.op, first.cause, first.pattern) == ("aten._to_copy", "range", "")
    first = first_of(lambda x: x.half().float() * -1e8, X)
    assert (first.op, first.direction, first.pattern) == ("aten._to_copy", "backward", "")
    first = first_of(lambda x: x.half() * 300 * 300, X / 4)
    assert (first.op, first.direction) == ("aten.mul", "backward")
    assert "float()" not in " ".join(first.remedies)


def test_what_a_product_reads_is_data_and_no_mask():
    inf, weight = float("inf"), torch.ones(3, 3)
    first = first_of(lambda x: (x.masked_fill(X > 1, inf) @ weight).softmax(-1), X)
    assert first.what.startswith("the constant float('inf')")
    first = first_of(lambda x: ((x * -1e9).half() @ weight.half()).softmax(-1), X)
    assert (first.op, first.cause, first.pattern) == ("aten._to_copy", "range", "")


def test_a_norm_that_is_0_is_named_in_every_dtype():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        first = first_of(lambda x, low=dtype: x.to(low) / (x.to(low) * 0).norm(), X)
        assert first.pattern == "a vector over its norm"


def half(function, x=X, **modules):
    """Traces a model in fp16 whose forward is a function of it and of a linear layer's output."""

    linear = nn.Linear(3, 3, bias=False)
    nn.init.eye_(linear.weight)
    net = Body(lambda self, x: function(self, self.linear(x)), linear=linear, **modules)
    with trace_overflow() as trace:
        function(net, X)  # a first call makes the model known
        net = net.half()
        net(x.half()).float().sum().backward()
    return trace.first


def test_a_product_is_an_attention_s_only_between_activations_before_a_softmax():
    large = torch.full((1, 3), 300.0)
    product = "a product, as of an attention's scores"
    assert half(lambda net, x: (x.mT @ x).softmax(-1), large).pattern == product
    assert half(lambda net, x: (x.mT @ x) / x.sum(), large).pattern == ""
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.weight, 300.0)
    first = half(lambda net, x: net.layer(x).softmax(-1), large, layer=layer)
    assert first.pattern == "a product with weights that are much too large"
    assert first.remedies[0].startswith("use bf16")


def test_a_parameter_that_nothing_initialized_is_named():
    with new_memory_holds_nan(), trace_overflow() as trace:
        weight = nn.Parameter(torch.empty(3))
        Body(lambda self, x: x * self.weight, weight=weight)(X).sum().backward()
    assert trace.first.cause == "weights"
    assert "(weight) was made by torch.empty" in trace.first.why
    assert "nn.init" in trace.first.remedy
