"""mlp, fused_dense, contrib's layer norm, cross entropy and clipping, fused_layer_norm_cuda."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_layer_norm_cuda as kernels
from apex import amp, fused_dense
from apex._autocast_utils import _cast_if_autocast_enabled, _get_autocast_dtypes, _get_current_dtype
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN, _fast_layer_norm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.mlp import MLP, MlpFunction, mlp_function
from tests.support import fused
from tests.support.host_reads import HostReads
from tests.support.reference import norms

FULL, BF16, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = [6, 5, 4, 3]
ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


# -- apex.mlp and apex.fused_dense ---------------------------------------------------------------


class Around(torch.autograd.Function):
    """As DLRM's own function: calls the methods of apex's."""

    @staticmethod
    def forward(*args):
        return MlpFunction.forward(*args)

    @staticmethod
    def backward(*args):
        return MlpFunction.backward(*args)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_linear_layers_with_activations(activation, bias):
    model = MLP(SIZES, bias, activation)
    torchs = nn.Sequential()
    for index, (before, after) in enumerate(itertools.pairwise(SIZES)):
        layer = nn.Linear(before, after, bias)
        state = {name: getattr(model, f"{name}_{index}") for name in layer.state_dict()}
        layer.load_state_dict(state)
        torchs.extend([layer, ACTIVATIONS[activation]()])
    x = torch.randn(2, 7, 6, requires_grad=True)
    weights, biases = ([getattr(torchs[2 * i], n) for i in range(3)] for n in ("weight", "bias"))
    wanted = torchs(x)
    wanted = [wanted, *norms.gradients(wanted, [x, *weights, *(biases if bias else [])])]
    args = [x, *model.weights, *model.biases]
    code = [*ACTIVATIONS].index(activation)
    for call in (mlp_function, MlpFunction.apply, Around.apply, lambda *_: model(x)):
        result = call(int(bias), code, *args)
        torch.testing.assert_close([result, *norms.gradients(result, args)], wanted)


def test_each_use_of_a_tensor_in_an_mlp_function_has_its_own_gradient():
    weight = torch.randn(4, 4, requires_grad=True)
    grads = []
    for call in (mlp_function, MlpFunction.apply):
        x = weight * 2.0  # depends on the weight, which two layers share
        grads += torch.autograd.grad(call(0, 1, x, weight, weight).square().sum(), weight)
    torch.testing.assert_close(*grads)


def test_an_mlp_starts_as_apexs_and_refuses_what_does_not_fit():
    model = MLP([300, 500])
    assert model.weight_0.std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.05)
    assert model.weight_0.mean().item() == pytest.approx(0.0, abs=0.01)
    assert model.bias_0.mean().item() == pytest.approx(0.0, abs=0.01)
    assert model.bias_0.std().item() == pytest.approx((1 / 500) ** 0.5, rel=0.2)
    assert list(MLP(SIZES, bias=False).state_dict()) == ["weight_0", "weight_1", "weight_2"]
    assert repr(MLP(tuple(SIZES))) == "MLP(MLP sizes: [6, 5, 4, 3], Bias=1, activation=1)"
    with pytest.raises(TypeError, match="'gelu'; it takes 'none', 'relu' or 'sigmoid'"):
        MLP(SIZES, activation="gelu")
    with pytest.raises(ValueError, match=r"mlp_sizes is \[4\]; it must have at least 2 items"):
        MLP([4])
    with pytest.raises(ValueError, match="as many biases"):
        mlp_function(1, 1, torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="activation=7"):
        mlp_function(0, 7, torch.ones(2, 2), torch.ones(2, 2))


def test_dense_layers_and_functions_are_torchs_chains_with_their_gradients():
    x = torch.randn(2, 5, 4)
    for layer, function in (
        (fused_dense.FusedDense(4, 3), fused_dense.FusedDenseFunc),
        (fused_dense.DenseNoBias(4, 3), fused_dense.DenseNoBiasFunc),
        (fused_dense.FusedDenseGeluDense(4, 6, 3), fused_dense.FusedDenseGeluDenseFunc),
    ):
        params = list(layer.parameters())
        wanted = F.linear(x, *params[:2])
        if len(params) == 4:
            wanted = F.linear(F.gelu(wanted), *params[2:])
        wanted = [wanted, *norms.gradients(wanted, params)]
        for result in (layer(x), function.apply(x, *params)):
            assert all(map(torch.equal, [result, *norms.gradients(result, params)], wanted))
    with pytest.raises(ValueError, match=r"torch\.nn\.Sequential"):
        fused_dense.FusedDenseGeluDense(4, 6, 3, bias=False)


@pytest.mark.parametrize(("level", "dtype"), [("O1", HALF), ("O4", BF16)])
def test_layers_compute_in_low_precision_where_amp_casts(level, dtype):
    layers = [MLP([4, 4]), fused_dense.FusedDense(4, 4), fused_dense.FusedDenseGeluDense(4, 4, 2)]
    model = amp.initialize(nn.Sequential(*layers), opt_level=level, verbosity=0)
    assert {layer(torch.ones(2, 4)).dtype for layer in model} == {dtype}


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
    with torch.autocast("cpu", BF16):
        assert module(x).dtype is BF16


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF, DOUBLE])
def test_cross_entropy_and_its_gradients_are_the_formulas(dtype):
    logits = torch.randn(6, 5).to(dtype).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    for smoothing, padding_idx in itertools.product((0.0, 0.1, 1.0), (0, 3, -100)):
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx)
        wide = logits.double()
        log_probs = wide - wide.exp().sum(1, keepdim=True).log()
        target = torch.full_like(log_probs, smoothing / 5)
        target[torch.arange(6), labels] += 1 - smoothing
        expected = -(target * log_probs).sum(1) * (labels != padding_idx)
        norms.assert_close(losses, expected)
        (grad,), (wanted,) = norms.gradients(losses, [logits]), norms.gradients(expected, [logits])
        norms.assert_close(grad, wanted)
        assert not grad[labels == padding_idx].any()
        args = (logits, labels.int(), smoothing, padding_idx, True)
        assert SoftmaxCrossEntropyLoss.apply(*args).dtype is (DOUBLE if dtype is DOUBLE else FULL)


def test_cross_entropy_refuses_what_does_not_fit():
    logits, labels = torch.randn(6, 5), torch.zeros(6, dtype=torch.int64)
    for bad in ((logits[None], labels[None]), (logits, labels.float())):
        with pytest.raises(ValueError, match=r"takes \[N, classes\] and class indices \[N\]"):
            SoftmaxCrossEntropyLoss.apply(*bad)
    with pytest.raises(ValueError, match="it must be at least 0 and at most 1"):
        SoftmaxCrossEntropyLoss.apply(logits, labels, 1.5)


def with_gradients(dtype=FULL):
    params = fused.parameters(dtype)
    fused.give(params, fused.gradients(params, 0))
    return params


@pytest.mark.parametrize("norm_type", [1.0, 2, 3.0, float("inf"), "inf"])
def test_clipping_is_torchs(norm_type):
    for dtype, max_norm in itertools.product((FULL, DOUBLE, torch.complex64), (0.5, 100.0)):
        ours, theirs = with_gradients(dtype), with_gradients(dtype)
        found = clip_grad_norm_(ours, max_norm, norm_type=norm_type, error_if_nonfinite=True)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
        torch.testing.assert_close(found, expected)
        fused.assert_same([p.grad for p in ours], [p.grad for p in theirs])


def test_clipping_takes_norms_in_fp32_over_all_dtypes_and_refuses_bad_input():
    params = with_gradients() + with_gradients(BF16) + fused.parameters(HALF, [(4,)])
    params[-1].grad = torch.full((4,), 4e4, dtype=HALF)
    with HostReads() as reads:
        norm = clip_grad_norm_((p for p in params), 2.0)
    assert reads.count == 0
    torch.testing.assert_close(norm, torch.tensor(8e4), rtol=1e-3, atol=0)
    torch.testing.assert_close(params[-1].grad, torch.ones(4).half(), rtol=1e-2, atol=0)
    assert clip_grad_norm_(fused.parameters(), 1.0) == 0.0
    params[0].grad[0, 0] = float("inf")
    before = [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"clip_grad_norm_: max_norm is -1.0; it must be"):
        clip_grad_norm_(params, -1.0)
    fused.assert_same([p.grad for p in params], before, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"got the model Linear; .*Pass model\.parameters\(\)"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0)
    params[0].grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        clip_grad_norm_(params, 1.0)


# -- fused_layer_norm_cuda -----------------------------------------------------------------------

SHAPE, EPS = (2, 4), 1e-5


def formula(x, weight, bias, grad, *, rms):
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
    made = 1 + torch.randn(3, 5, *SHAPE), 1 + torch.randn(SHAPE) / 4, torch.randn(SHAPE)
    x, weight, bias, grad = (t.to(dtype) for t in (*made, torch.randn(3, 5, *SHAPE)))
    result, mean, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    found = kernels.backward_affine(grad, mean, invvar, x, SHAPE, weight, bias, EPS)
    close([result, *found], formula(x, weight, bias, grad, rms=False))
    assert {t.dtype for t in (result, *found)} == {dtype}
    wide = x.double().flatten(2).flatten(0, 1)
    close([mean, invvar], [wide.mean(1), (wide.var(1, correction=0) + EPS).rsqrt()])
    result, invvar = kernels.rms_forward_affine(x, SHAPE, weight, EPS)
    found = kernels.rms_backward_affine(grad, invvar, x, SHAPE, weight, EPS)
    close([result, *found], formula(x, weight, None, grad, rms=True))
    assert mean.dtype is invvar.dtype is FULL
    result, mean, invvar = kernels.forward(x, SHAPE, EPS)
    found = kernels.backward(grad, mean, invvar, x, SHAPE, EPS)
    close([result, found], formula(x, None, None, grad, rms=False))
    result, invvar = kernels.rms_forward(x, SHAPE, EPS)
    found = kernels.rms_backward(grad, invvar, x, SHAPE, EPS)
    close([result, found], formula(x, None, None, grad, rms=True))
    mixed = kernels.forward_affine_mixed_dtypes(x.float(), SHAPE, weight, bias, EPS)[0]
    rms = kernels.rms_forward_affine_mixed_dtypes(x.float(), SHAPE, weight, EPS)[0]
    assert mixed.dtype is rms.dtype is dtype


def test_gradients_of_kernels_may_come_from_the_result():
    made = torch.randn(3, *SHAPE), 1 + torch.rand(SHAPE), torch.randn(SHAPE), torch.randn(3, *SHAPE)
    x, weight, bias, grad = made
    result, _, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    found = kernels.backward_affine(grad, None, invvar, result, SHAPE, weight, bias, EPS, True)
    close(found, formula(x, weight, bias, grad, rms=False)[1:])
    result, invvar = kernels.rms_forward_affine(x, SHAPE, weight, EPS)
    found = kernels.rms_backward_affine(grad, invvar, result, SHAPE, weight, EPS, True)
    close(found, formula(x, weight, None, grad, rms=True)[1:])


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
