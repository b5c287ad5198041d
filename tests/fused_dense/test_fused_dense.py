"""Dense layers against torch's own."""

import pytest
import torch
from torch import nn

import apex
from apex import amp, fused_dense


def linear(weight, bias):
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_is_torch_s_linear(bias):
    layer = apex.fused_dense.FusedDense(4, 3, bias=bias)
    assert (layer.bias is not None) is bias
    x = torch.randn(2, 5, 4)
    assert torch.equal(layer(x), linear(layer.weight, layer.bias)(x))


def test_a_layer_without_bias_has_none():
    assert list(fused_dense.DenseNoBias(4, 3).state_dict()) == ["weight"]


def test_dense_gelu_dense_is_torch_s_chain_with_its_gradients():
    layer = fused_dense.FusedDenseGeluDense(4, 6, 3)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight1": (6, 4),
        "bias1": (6,),
        "weight2": (3, 6),
        "bias2": (3,),
    }
    chain = nn.Sequential(
        linear(layer.weight1, layer.bias1), nn.GELU(), linear(layer.weight2, layer.bias2)
    )
    x = torch.randn(5, 4)
    assert torch.equal(layer(x), chain(x))
    layer(x).square().sum().backward()
    chain(x).square().sum().backward()
    for ours, theirs in zip(
        (layer.weight1, layer.bias1, layer.weight2, layer.bias2), chain.parameters(), strict=True
    ):
        assert torch.equal(ours.grad, theirs.grad)


def test_dense_gelu_dense_has_biases():
    with pytest.raises(ValueError, match=r"torch\.nn\.Sequential"):
        fused_dense.FusedDenseGeluDense(4, 6, 3, bias=False)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (fused_dense.FusedDenseFunc, [(2, 5, 4), (3, 4), (3,)]),
        (fused_dense.DenseNoBiasFunc, [(5, 4), (3, 4)]),
        (fused_dense.FusedDenseGeluDenseFunc, [(2, 5, 4), (6, 4), (6,), (3, 6), (3,)]),
    ],
)
def test_the_autograd_functions_have_right_gradients(function, shapes):
    assert issubclass(function, torch.autograd.Function)
    generator = torch.Generator().manual_seed(0)
    arguments = [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(function.apply, arguments)


def test_layers_cast_at_o4():
    model = nn.Sequential(fused_dense.FusedDense(4, 4), fused_dense.FusedDenseGeluDense(4, 4, 2))
    model = amp.initialize(model, opt_level="O4", verbosity=0)
    assert model(torch.ones(2, 4)).dtype is torch.bfloat16
