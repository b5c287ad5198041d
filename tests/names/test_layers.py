"""mlp, fused_dense, contrib's layer norm, cross entropy and clipping, and the ``_cuda`` modules."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex
import fused_adam_cuda
import fused_layer_norm_cuda as kernels
from apex import amp, fused_dense
from apex._autocast_utils import (
    _cast_if_autocast_enabled,
    _get_autocast_dtypes,
    _get_current_dtype,
)
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN, _fast_layer_norm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.mlp import MLP, MlpFunction, mlp_function
from tests.support import optimizers as cases
from tests.support.reference import norms

FULL, BF16, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = [6, 5, 4, 3]
ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}

# -- apex.mlp ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_linear_layers_with_activations(activation, bias):
    model = MLP(SIZES, bias, activation)
    torchs = nn.Sequential()
    for index, (before, after) in enumerate(itertools.pairwise(SIZES)):
        torchs.extend([nn.Linear(before, after, bias), ACTIVATIONS[activation]()])
        torchs[-2].load_state_dict(
            {n: getattr(model, f"{n}_{index}") for n, _ in torchs[-2].named_parameters()}
        )
    x = torch.randn(2, 7, 6)
    ours, wanted = model(x), torchs(x)
    assert torch.equal(ours, wanted)
    ours.square().sum().backward()
    wanted.square().sum().backward()
    for index in range(3):
        layer = torchs[2 * index]
        assert torch.equal(getattr(model, f"weight_{index}").grad, layer.weight.grad)
        assert not bias or torch.equal(getattr(model, f"bias_{index}").grad, layer.bias.grad)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.weight_2)
    assert torch.equal(model(x), ours)
    assert not torch.equal(twin(x), ours)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_autograd_function_of_an_mlp_has_its_gradients(code):
    model, x = MLP(SIZES), torch.randn(2, 6, requires_grad=True)
    args = [x, *model.weights, *model.biases]
    found = []
    for call in (MlpFunction.apply, mlp_function):
        result = call(1, code, *args)
        scale = torch.linspace(-1, 1, result.numel()).view_as(result)
        found.append([result, *torch.autograd.grad((result * scale).sum(), args)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with torch.autocast("cpu", BF16, cache_enabled=False):
        result = MlpFunction.apply(1, code, *args)
    assert result.dtype is BF16
    assert {grad.dtype for grad in torch.autograd.grad(result.sum(), args)} == {FULL}


def test_an_mlp_starts_as_apexs_and_refuses_what_does_not_fit():
    model = MLP([300, 500])
    assert model.weight_0.std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.05)
    assert model.bias_0.std().item() == pytest.approx((1 / 500) ** 0.5, rel=0.2)
    assert list(MLP(SIZES, bias=False).state_dict()) == ["weight_0", "weight_1", "weight_2"]
    assert repr(MLP(tuple(SIZES))) == "MLP(MLP sizes: [6, 5, 4, 3], Bias=1, activation=1)"
    with pytest.raises(TypeError, match="'gelu'; it takes 'none', 'relu' or 'sigmoid'"):
        MLP(SIZES, activation="gelu")
    with pytest.raises(ValueError, match=r"mlp_sizes is \[4\]; it must have at least 2 items"):
        MLP([4])
    with pytest.raises(ValueError, match=r"shape \[2, 5\]; its last dimension must have size 6"):
        MLP(SIZES)(torch.ones(2, 5))
    with pytest.raises(ValueError, match="as many biases"):
        mlp_function(1, 1, torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="activation=7"):
        mlp_function(0, 7, torch.ones(2, 2), torch.ones(2, 2))


# -- apex.fused_dense ----------------------------------------------------------------------------


def linear(weight, bias):
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


def test_dense_layers_are_torchs_chains_with_their_gradients():
    x = torch.randn(2, 5, 4)
    for bias in (True, False):
        layer = apex.fused_dense.FusedDense(4, 3, bias=bias)
        assert torch.equal(layer(x), linear(layer.weight, layer.bias)(x))
    assert list(fused_dense.DenseNoBias(4, 3).state_dict()) == ["weight"]
    layer = fused_dense.FusedDenseGeluDense(4, 6, 3)
    first, last = linear(layer.weight1, layer.bias1), linear(layer.weight2, layer.bias2)
    chain = nn.Sequential(first, nn.GELU(), last)
    assert torch.equal(layer(x), chain(x))
    layer(x).square().sum().backward()
    chain(x).square().sum().backward()
    own = (layer.weight1, layer.bias1, layer.weight2, layer.bias2)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(own, chain.parameters(), strict=True))
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
def test_autograd_functions_have_right_gradients(function, shapes):
    arguments = [torch.randn(shape, dtype=DOUBLE, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function.apply, arguments)


# -- apex.contrib --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
def test_fast_layer_norm_is_the_formula_in_the_inputs_dtype(dtype):
    module, x = FastLayerNorm(8), torch.randn(2, 3, 8).to(dtype)
    nn.init.normal_(module.weight)
    result, params = module(x), (module.weight, module.bias, module.epsilon)
    assert result.dtype is dtype
    norms.assert_close(result, norms.layer_norm(x, module.weight, module.bias, eps=1e-5))
    assert torch.equal(FastLayerNormFN.apply(x, *params), result)
    assert torch.equal(_fast_layer_norm(x, *params), result)
    assert list(module.state_dict()) == ["weight", "bias"]
    with torch.autocast("cpu", BF16):
        assert module(x).dtype is BF16


def batch(dtype=FULL):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 5, generator=generator).to(dtype).requires_grad_()
    return logits, torch.tensor([0, 1, 2, 3, 4, 0])


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF, DOUBLE])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_and_its_gradients_are_the_formulas(smoothing, dtype):
    for padding_idx in (0, 3, -100):
        logits, labels = batch(dtype)
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx)
        wide = logits.double()
        log_probs = wide - wide.exp().sum(1, keepdim=True).log()
        target = torch.full_like(log_probs, smoothing / 5)
        target[torch.arange(6), labels] += 1 - smoothing
        expected = -(target * log_probs).sum(1) * (labels != padding_idx)
        norms.assert_close(losses, expected)
        scale = torch.linspace(0.5, 1.5, 6).to(dtype)
        (grad,) = torch.autograd.grad((losses * scale).sum(), logits)
        norms.assert_close(grad, *torch.autograd.grad((expected * scale).sum(), logits))
        assert not grad[labels == padding_idx].any()
        module = SoftmaxCrossEntropyLoss(smoothing, padding_idx, half_to_float=True)
        again = pickle.loads(pickle.dumps(module))(logits, labels.int())
        assert again.dtype is (DOUBLE if dtype is DOUBLE else FULL)
        assert torch.equal(again.to(dtype), losses)


def test_cross_entropy_without_smoothing_is_torchs_and_bad_input_is_refused():
    logits, labels = batch()
    ours = SoftmaxCrossEntropyLoss.apply(logits, labels)
    assert torch.equal(ours, F.cross_entropy(logits, labels, ignore_index=0, reduction="none"))
    visited = []
    nn.Sequential(SoftmaxCrossEntropyLoss()).apply(visited.append)  # a module's own apply
    assert len(visited) == 2
    with pytest.raises(ValueError, match=r"takes \[N, classes\] and \[N\]. Flatten"):
        SoftmaxCrossEntropyLoss.apply(torch.ones(2, 3, 5), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="must be class indices"):
        SoftmaxCrossEntropyLoss.apply(logits, labels.float())
    with pytest.raises(ValueError, match="it must be at least 0 and at most 1"):
        SoftmaxCrossEntropyLoss(1.5)


def with_gradients(dtype=FULL):
    params = cases.parameters(dtype)
    cases.give(params, cases.gradients(params, 0))
    return params


@pytest.mark.parametrize("norm_type", [1.0, 2, 3.0, float("inf"), "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_torchs(norm_type, max_norm):
    for dtype in (FULL, DOUBLE, torch.complex64):
        ours, theirs = with_gradients(dtype), with_gradients(dtype)
        found = clip_grad_norm_(ours, max_norm, norm_type=norm_type)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
        torch.testing.assert_close(found, expected)
        cases.assert_same([p.grad for p in ours], [p.grad for p in theirs])


def test_clipping_takes_norms_in_fp32_over_all_dtypes_and_refuses_bad_input():
    params = with_gradients() + with_gradients(BF16) + cases.parameters(HALF, [(4,)])
    params[-1].grad = torch.full((4,), 4e4, dtype=HALF)
    with cases.HostReads() as reads:
        norm = clip_grad_norm_((p for p in params), 2.0)
    assert reads.count == 0
    torch.testing.assert_close(norm, torch.tensor(8e4), rtol=1e-3, atol=0)
    torch.testing.assert_close(params[-1].grad, torch.ones(4).half(), rtol=1e-2, atol=0)
    assert clip_grad_norm_(cases.parameters(), 1.0) == 0.0
    params[0].grad[0, 0] = float("inf")
    before = [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"clip_grad_norm_ got max_norm=-1.0; it must be"):
        clip_grad_norm_(params, -1.0)
    cases.assert_same([p.grad for p in params], before, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"got the model Linear; .*Pass model\.parameters\(\)"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0)
    params[0].grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        clip_grad_norm_(params, 1.0)


# -- fused_layer_norm_cuda -----------------------------------------------------------------------

SHAPE, EPS = (2, 4), 1e-5


def rows(dtype=FULL):
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.randn(3, 5, *SHAPE, generator=generator)
    weight = 1 + torch.randn(*SHAPE, generator=generator) / 4
    bias, grad = torch.randn(SHAPE, generator=generator), torch.randn(x.shape, generator=generator)
    return [each.to(dtype) for each in (x, weight, bias, grad)]


def expected(x, weight, bias, grad, *, rms):
    """The result, and the gradients of all that is not None, in fp64."""
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    weight, bias = (*leaves[1:], None, None)[:2]
    if rms:
        result = norms.rms_norm(leaves[0], weight, dims=2, eps=EPS)
    else:
        result = norms.layer_norm(leaves[0], weight, bias, dims=2, eps=EPS)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.double())]


def close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        norms.assert_close(ours, theirs, ulps=16)


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
def test_kernels_give_norms_statistics_and_gradients(dtype):
    x, weight, bias, grad = rows(dtype)
    result, mean, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    found = kernels.backward_affine(grad, mean, invvar, x, SHAPE, weight, bias, EPS)
    close([result, *found], expected(x, weight, bias, grad, rms=False))
    assert {t.dtype for t in (result, *found)} == {dtype}
    wide = x.double().flatten(2).flatten(0, 1)
    close([mean, invvar], [wide.mean(1), (wide.var(1, correction=0) + EPS).rsqrt()])
    result, invvar = kernels.rms_forward_affine(x, SHAPE, weight, EPS)
    found = kernels.rms_backward_affine(grad, invvar, x, SHAPE, weight, EPS)
    close([result, *found], expected(x, weight, None, grad, rms=True))
    assert mean.dtype is invvar.dtype is FULL
    result, mean, invvar = kernels.forward(x, SHAPE, EPS)
    found = kernels.backward(grad, mean, invvar, x, SHAPE, EPS)
    close([result, found], expected(x, None, None, grad, rms=False))
    result, invvar = kernels.rms_forward(x, SHAPE, EPS)
    found = kernels.rms_backward(grad, invvar, x, SHAPE, EPS)
    close([result, found], expected(x, None, None, grad, rms=True))
    mixed = kernels.forward_affine_mixed_dtypes(x.float(), SHAPE, weight, bias, EPS)[0]
    rms = kernels.rms_forward_affine_mixed_dtypes(x.float(), SHAPE, weight, EPS)[0]
    assert mixed.dtype is rms.dtype is dtype


# -- fused_adam_cuda -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("correct", [0, 1])
def test_fused_adam_cuda_is_its_plain_loop(mode, correct):
    for dtype in (FULL, BF16):
        generator = torch.Generator().manual_seed(0)
        p, m, v, g = torch.randn(4, 3, 5, generator=generator).unbind()
        v = v.abs()
        reference = cases.LegacyAdam(
            [p.double()], lr=0.1, betas=(0.8, 0.9), eps=1e-4, inside=mode == 0, weight_decay=0.1,
            bias_correction=bool(correct),
        )  # fmt: skip
        reference.count, reference.state = 2, [{"m": m.double(), "v": v.double()}]
        out, given = torch.zeros(3, 5, dtype=dtype), (g * 8).to(dtype)
        reference.step([given.double() / 8])
        args = (0.1, 0.8, 0.9, 1e-4, 8.0, 3, mode, correct, 0.1)
        fused_adam_cuda.adam(p, out, m, v, given, *args)
        wanted = reference.params[0], reference.state[0]["m"], reference.state[0]["v"]
        for ours, theirs in zip((p, m, v), wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
        assert torch.equal(out, p.to(dtype))
        assert torch.equal(given, (g * 8).to(dtype))


# -- apex._autocast_utils ------------------------------------------------------------------------


def test_autocast_utils_cast_as_autocast_does():
    x, shape = torch.ones(2, 3, requires_grad=True), torch.Size([3])
    found = _cast_if_autocast_enabled(x, None, shape, 1e-5)
    assert found[0] is x
    assert found[1:] == (None, shape, 1e-5)
    kept = torch.ones(2, dtype=DOUBLE), torch.ones(2, dtype=torch.int64), shape
    with torch.autocast("cpu", dtype=HALF):
        low, nested, *others = _cast_if_autocast_enabled(x, [torch.ones(1)], *kept)
    assert low.dtype is nested[0].dtype is HALF
    assert all(a is b for a, b in zip(kept, others, strict=True))
    low.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert _get_current_dtype() is _get_current_dtype(HALF) is FULL
    assert set(_get_autocast_dtypes()) <= {HALF, BF16}


@pytest.mark.parametrize(("level", "dtype"), [("O1", HALF), ("O4", BF16)])
def test_layers_compute_in_low_precision_where_amp_casts(level, dtype):
    model = nn.Sequential(
        MLP([4, 4]), fused_dense.FusedDense(4, 4), fused_dense.FusedDenseGeluDense(4, 4, 2)
    )
    model = amp.initialize(model, opt_level=level, verbosity=0)
    assert model[:1](torch.ones(2, 4)).dtype is model(torch.ones(2, 4)).dtype is dtype
