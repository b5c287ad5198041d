"""The fused norms as modules."""

import copy

import pytest
import torch
from torch import nn

from apex import normalization
from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
)
from tests.normalization import cases
from tests.normalization.cases import BF16, FULL, HALF, SIZE
from tests.support.reference import norms

MODULES = [getattr(normalization, name) for name in cases.MODULES]
MIXED = [MixedFusedLayerNorm, MixedFusedRMSNorm]
PLAIN = [FusedLayerNorm, FusedRMSNorm]


def reference(module, x):
    if isinstance(module, FusedRMSNorm):
        return norms.rms_norm(x, module.weight, eps=module.eps)
    return norms.layer_norm(x, module.weight, module.bias, eps=module.eps)


@pytest.mark.parametrize("name", cases.MODULES)
def test_public_names_are_those_of_the_module_fused_layer_norm(name):
    assert name in normalization.__all__
    assert getattr(normalization, name) is getattr(fused_layer_norm, name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
@pytest.mark.parametrize("kind", MODULES)
def test_values_are_those_of_the_formula(kind, dtype, device):
    module, x = kind(SIZE).to(device), torch.randn(3, SIZE).to(device, dtype)
    nn.init.normal_(module.weight)
    norms.assert_close(module(x), reference(module, x))


@pytest.mark.parametrize(
    ("kind", "keys"), [(FusedLayerNorm, ["weight", "bias"]), (FusedRMSNorm, ["weight"])]
)
def test_state_dict_has_the_keys_of_torchs_norms(kind, keys):
    torchs = nn.LayerNorm(SIZE) if kind is FusedLayerNorm else nn.RMSNorm(SIZE)
    assert list(kind(SIZE).state_dict()) == list(torchs.state_dict()) == keys


def test_state_dict_of_torchs_layer_norm_loads():
    torchs, ours = nn.LayerNorm(SIZE), FusedLayerNorm(SIZE)
    nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(3, SIZE)
    assert torch.equal(ours(x), torchs(x))


@pytest.mark.parametrize("kind", MODULES)
def test_weight_starts_at_one_and_bias_at_zero(kind):
    module = kind(SIZE)
    assert torch.equal(module.weight, torch.ones(SIZE))
    if hasattr(module, "bias"):
        assert torch.equal(module.bias, torch.zeros(SIZE))


@pytest.mark.parametrize("kind", MODULES)
def test_reset_parameters_makes_them_as_new(kind):
    module = kind(SIZE)
    for param in module.parameters():
        nn.init.normal_(param)
    module.reset_parameters()
    new = dict(kind(SIZE).named_parameters())
    assert all(torch.equal(param, new[name]) for name, param in module.named_parameters())


@pytest.mark.parametrize("kind", PLAIN)
def test_without_affine_there_are_no_parameters(kind):
    module, x = kind(SIZE, elementwise_affine=False), torch.randn(3, SIZE)
    assert not list(module.parameters())
    assert module.weight is None
    plain = norms.rms_norm if kind is FusedRMSNorm else norms.layer_norm
    norms.assert_close(module(x), plain(x, eps=1e-5))


@pytest.mark.parametrize("shape", [SIZE, [SIZE], (SIZE,), torch.Size((SIZE,))])
@pytest.mark.parametrize("kind", MODULES)
def test_normalized_shape_is_an_integer_or_a_sequence(kind, shape):
    module = kind(shape)
    assert module.normalized_shape == torch.Size((SIZE,))
    assert isinstance(module.normalized_shape, torch.Size)


@pytest.mark.parametrize("kind", MODULES)
def test_eps_is_a_hundred_thousandth_by_default(kind):
    assert kind(SIZE).eps == 1e-5


def test_repr_shows_the_options():
    shown = repr(FusedLayerNorm((4, SIZE), eps=0.5))
    assert shown == "FusedLayerNorm((4, 8), eps=0.5, elementwise_affine=True)"


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
@pytest.mark.parametrize("kind", PLAIN)
def test_fused_result_has_the_dtype_of_the_input(kind, dtype):
    assert kind(SIZE)(torch.randn(3, SIZE).to(dtype)).dtype is dtype


@pytest.mark.parametrize("weight_dtype", [FULL, BF16, HALF])
@pytest.mark.parametrize("dtype", [FULL, BF16])
@pytest.mark.parametrize("kind", MIXED)
def test_mixed_result_has_the_dtype_of_the_weight(kind, dtype, weight_dtype):
    module = kind(SIZE).to(weight_dtype)
    assert module(torch.randn(3, SIZE).to(dtype)).dtype is weight_dtype


@pytest.mark.parametrize("weight_dtype", [BF16, HALF])
def test_rms_norm_with_low_precision_weight_brings_an_fp32_residual_to_its_dtype(weight_dtype):
    # T5 in fp16: the residual is fp32, the layer after the norm takes fp16.
    module = FusedRMSNorm(SIZE).to(weight_dtype)
    assert module(torch.randn(3, SIZE)).dtype is weight_dtype


@pytest.mark.parametrize("kind", MODULES)
def test_a_copy_gives_the_same_result(kind):
    module, x = kind(SIZE), torch.randn(3, SIZE)
    assert torch.equal(copy.deepcopy(module)(x), module(x))


@pytest.mark.parametrize("kind", MODULES)
def test_a_subclass_may_extend_forward(kind):
    class Unused(kind):
        @torch.jit.unused
        def forward(self, x):
            return super().forward(x)

    x = torch.randn(3, SIZE)
    assert torch.equal(Unused(SIZE)(x), kind(SIZE)(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_scripted_modules_give_the_same_result(kind):
    module, x = kind(SIZE), torch.randn(3, SIZE)
    assert torch.equal(torch.jit.script(module)(x), module(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_traced_modules_give_the_same_result(kind):
    module, x = kind(SIZE), torch.randn(3, SIZE)
    assert torch.equal(torch.jit.trace(module, x)(x), module(x))


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_without_affine_is_refused_with_the_class_to_use(kind):
    with pytest.raises(RuntimeError, match=r"Use Fused\w+Norm\(\.\.\., elementwise_affine=False\)"):
        kind(SIZE, elementwise_affine=False)


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_with_affine_is_accepted(kind):
    assert kind(SIZE, elementwise_affine=True).weight is not None


@pytest.mark.parametrize("kind", MODULES)
def test_unknown_keywords_are_refused(kind):
    with pytest.raises(TypeError, match="momentum"):
        kind(SIZE, momentum=0.1)


@pytest.mark.parametrize("name", ["elementwise_affine", "memory_efficient"])
@pytest.mark.parametrize("kind", MODULES)
def test_a_flag_is_a_bool_or_its_name(kind, name):
    with pytest.raises(TypeError, match=f"{name} is 'no'; it must be a bool"):
        kind(SIZE, **{name: "no"})
    assert kind(SIZE, **{name: "True"}).weight is not None


@pytest.mark.parametrize("shape", ["8", 8.0, None, [8.0]])
@pytest.mark.parametrize("kind", MODULES)
def test_a_shape_of_another_type_is_refused(kind, shape):
    with pytest.raises(TypeError, match="an integer or a sequence of integers"):
        kind(shape)


@pytest.mark.parametrize("kind", MODULES)
def test_an_empty_shape_is_refused(kind):
    with pytest.raises(ValueError, match="last dimension"):
        kind([])
