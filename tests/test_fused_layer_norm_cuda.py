"""The module ``fused_layer_norm_cuda``, as autograd functions of other projects call it."""

import pytest
import torch

import fused_layer_norm_cuda as kernels
from apex import amp
from tests.support.reference import norms

SHAPE = (2, 4)
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype=torch.float32, weight_dtype=None):
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.randn(3, 5, *SHAPE, generator=generator)
    weight = 1 + torch.randn(*SHAPE, generator=generator) / 4
    bias, grad = torch.randn(SHAPE, generator=generator), torch.randn(x.shape, generator=generator)
    weight_dtype = weight_dtype or dtype
    return x.to(dtype), weight.to(weight_dtype), bias.to(weight_dtype), grad.to(dtype)


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
        bound = 16 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_layer_norm_and_its_gradients(dtype):
    x, weight, bias, grad = tensors(dtype)
    result, mean, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    found = kernels.backward_affine(grad, mean, invvar, x, SHAPE, weight, bias, EPS)
    close([result, *found], expected(x, weight, bias, grad, rms=False))
    assert {t.dtype for t in (result, *found)} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_rms_norm_and_its_gradients(dtype):
    x, weight, _, grad = tensors(dtype)
    result, invvar = kernels.rms_forward_affine(x, SHAPE, weight, EPS)
    found = kernels.rms_backward_affine(grad, invvar, x, SHAPE, weight, EPS)
    close([result, *found], expected(x, weight, None, grad, rms=True))


def test_norms_without_parameters():
    x, _, _, grad = tensors()
    result, mean, invvar = kernels.forward(x, SHAPE, EPS)
    found = kernels.backward(grad, mean, invvar, x, SHAPE, EPS)
    close([result, found], expected(x, None, None, grad, rms=False))
    result, invvar = kernels.rms_forward(x, SHAPE, EPS)
    found = kernels.rms_backward(grad, invvar, x, SHAPE, EPS)
    close([result, found], expected(x, None, None, grad, rms=True))


def test_the_result_can_take_the_place_of_the_input_in_the_backward_pass():
    x, weight, bias, grad = tensors()
    result, _, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    found = kernels.backward_affine(grad, None, invvar, result, SHAPE, weight, bias, EPS, True)
    close(found, expected(x, weight, bias, grad, rms=False)[1:])
    result, invvar = kernels.rms_forward_affine(x, SHAPE, weight, EPS)
    found = kernels.rms_backward_affine(grad, invvar, result, SHAPE, weight, EPS, True)
    close(found, expected(x, weight, None, grad, rms=True)[1:])
    result, _, invvar = kernels.forward(x, SHAPE, EPS)
    found = kernels.backward(grad, None, invvar, result, SHAPE, EPS, True)
    close([found], expected(x, None, None, grad, rms=False)[1:])


def test_a_weight_of_zero_gives_finite_gradients_from_the_result():
    x, weight, bias, grad = tensors()
    weight[0, 0], weight[1, 1] = 0.0, -0.0
    result, _, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    found = kernels.backward_affine(grad, None, invvar, result, SHAPE, weight, bias, EPS, True)
    assert all(each.isfinite().all() for each in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_fp32_and_one_per_row(dtype):
    x, weight, bias, _ = tensors(dtype)
    _, mean, invvar = kernels.forward_affine(x, SHAPE, weight, bias, EPS)
    _, rms = kernels.rms_forward_affine(x, SHAPE, weight, EPS)
    assert all(t.shape == (15,) and t.dtype is torch.float32 for t in (mean, invvar, rms))
    rows = x.double().flatten(2).flatten(0, 1)
    close([mean, invvar], [rows.mean(1), (rows.var(1, correction=0) + EPS).rsqrt()])
    close([rms], [(rows.square().mean(1) + EPS).rsqrt()])


def test_mixed_dtypes_give_the_dtype_of_the_weight():
    x, weight, bias, _ = tensors(torch.float32, torch.bfloat16)
    assert kernels.forward_affine(x, SHAPE, weight, bias, EPS)[0].dtype is torch.float32
    mixed = kernels.forward_affine_mixed_dtypes(x, SHAPE, weight, bias, EPS)[0]
    rms = kernels.rms_forward_affine_mixed_dtypes(x, SHAPE, weight, EPS)[0]
    assert mixed.dtype is rms.dtype is torch.bfloat16


class Norm(torch.autograd.Function):
    """A norm as projects write it on these functions."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        result, mean, invvar = kernels.forward_affine(x.contiguous(), (8,), weight, bias, EPS)
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, mean, invvar = ctx.saved_tensors
        return tuple(
            kernels.backward_affine(grad.contiguous(), mean, invvar, x, (8,), weight, bias, EPS)
        )


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_an_autograd_function_of_these_trains_at_every_level(opt_level):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, eps=EPS)

        def forward(self, x):
            return Norm.apply(self.linear(x), self.norm.weight, self.norm.bias)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    x = torch.randn(4, 8)
    plain = model.norm(model.linear(x.to(model.linear.weight.dtype))).float()
    out = model(x)
    torch.testing.assert_close(out.float(), plain, rtol=0.05, atol=0.05)
    with amp.scale_loss(out.float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(p.grad.isfinite().all() for p in amp.master_params(optimizer))
