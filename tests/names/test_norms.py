"""Fused norms against the plain formulas in fp64: functions, autograd functions and modules."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import normalization
from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apex.normalization import fused_layer_norm as fused
from tests.support.reference import norms

FULL, BF16, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZE = 8
# Functions to (autograd function, is it RMS norm, does the result have the weight's dtype).
AFFINE = {
    "fused_layer_norm_affine": ("FusedLayerNormAffine", False, False),
    "mixed_dtype_fused_layer_norm_affine": ("FusedLayerNormAffineMixedDtypes", False, True),
    "fused_rms_norm_affine": ("FusedRMSNormAffine", True, False),
    "mixed_dtype_fused_rms_norm_affine": ("FusedRMSNormAffineMixedDtypes", True, True),
}
MODULES = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
MIXES = [(x, w) for x in (FULL, BF16, HALF) for w in (FULL, BF16, HALF)] + [(DOUBLE, FULL)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(dtype=FULL, weight_dtype=None, *, shape=(3, 4, SIZE), device="cpu"):
    """Returns input, weight and bias, all with gradients."""
    made = torch.randn(shape), 1 + torch.randn(SIZE) / 4, torch.randn(SIZE) / 4
    dtypes = dtype, weight_dtype or dtype, weight_dtype or dtype
    return [t.to(device, kind).requires_grad_() for t, kind in zip(made, dtypes, strict=True)]


def leaves(name, x, weight, bias):
    return [x, weight] if AFFINE[name][1] else [x, weight, bias]


def run(name, x, weight, bias, eps=1e-5, **kwargs):
    return getattr(fused, name)(*leaves(name, x, weight, bias), (SIZE,), eps, **kwargs)


def reference(name, x, weight, bias, eps=1e-5):
    if AFFINE[name][1]:
        return norms.rms_norm(x, weight, eps=eps)
    return norms.layer_norm(x, weight, bias, eps=eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXES)
def test_values_dtypes_and_gradients_are_those_of_the_formula(dtype, weight_dtype, device):
    for name, (_, _, mixed) in AFFINE.items():
        made = tensors(dtype, weight_dtype, device=device)
        result, expected = run(name, *made), reference(name, *made)
        norms.assert_close(result, expected)
        assert result.dtype is (weight_dtype if mixed else dtype)
        inputs = leaves(name, *made)
        # The gradient that enters is rounded to the result's dtype, sums over 12 rows follow.
        bound = 16 * max(torch.finfo(kind).eps for kind in (dtype, weight_dtype))
        both = norms.gradients(result, inputs), norms.gradients(expected, inputs)
        for leaf, actual, wanted in zip(inputs, *both, strict=True):
            assert actual.dtype is leaf.dtype
            torch.testing.assert_close(actual.double(), wanted.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_norms_of_one_dtype_are_torchs_own_bit_for_bit(dtype):
    x, weight, bias = tensors(dtype)
    ours = fused.fused_layer_norm_affine(x, weight, bias, (SIZE,), 1e-5)
    assert torch.equal(ours, F.layer_norm(x, (SIZE,), weight, bias, 1e-5))
    ours = fused.fused_rms_norm_affine(x, weight, (SIZE,), 1e-5)
    assert torch.equal(ours, F.rms_norm(x, (SIZE,), weight, 1e-5))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gradients_of_many_rows_add_up_in_fp32(dtype):
    """torch's kernel on a CPU, in 16 bits, stands still."""
    norm = fused.FusedLayerNorm(2).to(dtype)
    x = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm(x).backward(torch.full_like(x, 1 / 4096))
    assert norm.bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", AFFINE)
def test_autograd_functions_give_what_the_functions_give(name):
    made = tensors()
    inputs, function = leaves(name, *made), getattr(fused, AFFINE[name][0] + "Function")
    applied = function.apply(*inputs, torch.Size((SIZE,)), 1e-5, True)
    results = [applied, run(name, *made, memory_efficient=True)]
    found = [[result, *norms.gradients(result, inputs)] for result in results]
    assert all(map(torch.equal, *found))
    with torch.autocast("cpu", BF16):
        assert function.apply(*inputs, (SIZE,), 1e-5).dtype is FULL  # as in apex
    low = made[0].bfloat16(), *inputs[1:]
    assert function.apply(*low, (SIZE,), 1e-5).dtype is (FULL if AFFINE[name][2] else BF16)
    # Megatron-LM looks for it there.
    assert inspect.getfullargspec(function.forward).args[-1] == "memory_efficient"
    plain = getattr(fused, AFFINE[name][0].partition("Affine")[0] + "Function")
    none = getattr(fused, "fused_rms_norm" if AFFINE[name][1] else "fused_layer_norm")
    assert torch.equal(plain.apply(made[0], (SIZE,), 1e-5), none(made[0], (SIZE,), 1e-5))
    # Public code derives from them.
    assert issubclass(function, torch.autograd.Function)
    assert issubclass(plain, torch.autograd.Function)


@pytest.mark.parametrize("name", AFFINE)
def test_second_derivatives_are_right_and_an_empty_batch_has_gradients_of_zero(name):
    inputs = leaves(name, *tensors(DOUBLE, shape=(2, SIZE)))
    calls = getattr(fused, name)
    assert torch.autograd.gradgradcheck(lambda *given: calls(*given, (SIZE,), 1e-3), inputs)
    made = tensors(shape=(0, SIZE))
    result = run(name, *made)
    result.sum().backward()
    assert result.shape == (0, SIZE)
    assert all(not leaf.grad.any() for leaf in leaves(name, *made))


@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_manual_rms_norm_has_the_dtype_of_t5s_own(dtype):
    x, ones = torch.randn(3, SIZE).to(dtype), torch.ones(SIZE)
    for weight in (ones, ones.bfloat16(), None):
        result = fused.manual_rms_norm(x, (SIZE,), weight, 1e-6)
        low = weight is not None and weight.dtype is BF16
        assert result.dtype is (BF16 if low else FULL)
        norms.assert_close(result, norms.rms_norm(x, weight, eps=1e-6))
        with torch.autocast("cpu", HALF):
            assert fused.manual_rms_norm(x, (SIZE,), weight, 1e-6).dtype is result.dtype


# -- under autocast ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("given", "low"), [(FULL, HALF), (FULL, BF16), (BF16, HALF), (HALF, HALF)])
def test_under_autocast_norms_have_its_dtype_and_are_computed_in_fp32(given, low, device):
    for name in AFFINE:
        made = tensors(given, FULL, device=device)
        # Far from zero, the differences that count are lost in 16 bits.
        made[0] = (made[0] + (100 if given is FULL else 0)).detach()
        with torch.autocast(device, low):
            result = run(name, *made)
            assert torch.is_autocast_enabled(device)
        assert result.dtype is low
        norms.assert_close(result, reference(name, *made))
        with torch.autocast(device, low):
            assert run(name, *tensors(DOUBLE, device=device)).dtype is DOUBLE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_norms_compile_whole_under_autocast(kind):
    module, x = kind(SIZE), torch.randn(3, SIZE)

    def forward(x):
        with torch.autocast("cpu", BF16):
            return module(x)

    graph = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
    torch.compiler.reset()
    assert graph.dtype is BF16
    torch.testing.assert_close(graph, forward(x))


# -- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
def test_modules_are_the_formula_with_torchs_parameters(kind):
    module, x = kind(SIZE), torch.randn(3, SIZE)
    rms = issubclass(kind, FusedRMSNorm)
    torchs = nn.RMSNorm(SIZE, 1e-5) if rms else nn.LayerNorm(SIZE)
    assert list(module.state_dict()) == list(torchs.state_dict())
    assert all(map(torch.equal, module.state_dict().values(), torchs.state_dict().values()))
    nn.init.normal_(torchs.weight)
    module.load_state_dict(torchs.state_dict())
    assert torch.equal(module(x), torchs(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    for dtype in (BF16, HALF):
        assert module(x.to(dtype)).dtype is (FULL if "Mixed" in kind.__name__ else dtype)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(SIZE))
    assert module.eps == 1e-5
    assert getattr(normalization, kind.__name__) is getattr(fused, kind.__name__)


@pytest.mark.parametrize("weight_dtype", [BF16, HALF])
def test_a_low_precision_weight_decides_for_rms_and_mixed_norms(weight_dtype):
    # T5 in fp16: the residual is fp32, the layer after the norm takes fp16.
    for kind in (FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm):
        assert kind(SIZE).to(weight_dtype)(torch.randn(3, SIZE)).dtype is weight_dtype


@pytest.mark.parametrize("kind", MODULES)
def test_options_are_checked(kind):
    assert kind([SIZE], elementwise_affine="True").normalized_shape == torch.Size((SIZE,))
    with pytest.raises(TypeError, match="momentum"):
        kind(SIZE, momentum=0.1)
    with pytest.raises(TypeError, match="memory_efficient is 'no'; it must be a bool"):
        kind(SIZE, memory_efficient="no")
    with pytest.raises(TypeError, match="an integer or a sequence of integers"):
        kind(8.0)
    with pytest.raises(ValueError, match="last dimension"):
        kind([])
    if "Mixed" in kind.__name__:
        with pytest.raises(RuntimeError, match="needs a weight"):
            kind(SIZE, elementwise_affine=False)
    else:
        module = kind(SIZE, elementwise_affine=False)
        assert module.weight is None
        assert module(torch.randn(2, SIZE)).shape == (2, SIZE)
    assert repr(kind((4, SIZE), eps=0.5)).endswith("((4, 8), eps=0.5, elementwise_affine=True)")
