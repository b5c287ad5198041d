"""FastLayerNorm is the fused layer norm over the last dimension."""

import inspect

import pytest
import torch

from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN, _fast_layer_norm
from tests.support.reference import norms

FULL, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
def test_values_are_those_of_the_formula_in_the_inputs_dtype(dtype, device):
    module, x = FastLayerNorm(8).to(device), torch.randn(2, 3, 8).to(device, dtype)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    result = module(x)
    assert result.dtype is dtype
    norms.assert_close(result, norms.layer_norm(x, module.weight, module.bias, eps=1e-5))


def test_gradients_are_those_of_the_formula():
    module, x = FastLayerNorm(8, eps=1e-3), torch.randn(3, 8, requires_grad=True)
    inputs, scale = [x, module.weight, module.bias], torch.randn(3, 8)
    expected = norms.layer_norm(x, module.weight, module.bias, eps=1e-3)
    grads = torch.autograd.grad((module(x) * scale).sum(), inputs)
    wanted = torch.autograd.grad((expected * scale).sum(), inputs)
    for grad, want in zip(grads, wanted, strict=True):
        norms.assert_close(grad, want, ulps=16)


def test_result_has_autocasts_dtype():
    with torch.autocast("cpu", BF16):
        assert FastLayerNorm(8)(torch.randn(2, 8)).dtype is BF16


def test_state_dict_has_weight_and_bias():
    assert list(FastLayerNorm(8).state_dict()) == ["weight", "bias"]


def test_epsilon_is_the_attribute_that_apex_has():
    assert FastLayerNorm(8).epsilon == 1e-5


def test_names_that_libraries_import_give_the_same():
    module, x = FastLayerNorm(8), torch.randn(3, 8)
    params = module.weight, module.bias, module.epsilon
    assert torch.equal(FastLayerNormFN.apply(x, *params), module(x))
    assert torch.equal(_fast_layer_norm(x, *params), module(x))


def test_libraries_find_memory_efficient_in_the_signature_of_forward():
    assert "memory_efficient" in inspect.getfullargspec(FastLayerNormFN.forward).args


def test_an_input_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[8\]"):
        FastLayerNorm(8)(torch.ones(2, 5))
