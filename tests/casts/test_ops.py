"""Op casts beyond apex's lists: RNNs, attention, einsum, dtype arguments."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.casts.op_rows import region_of
from tests.support.loops import each_of

low = each_of(torch.bfloat16, torch.float16, ids=["bf16", "fp16"])
device = each_of("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture
def region(low, device):
    return region_of(low, device)


# -- dtype rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [torch.float64, torch.bfloat16, None])
def test_dtype_argument_is_honoured(region, low, device, asked):
    x = torch.ones(2, 2, device=device).to(low)
    for fn in (F.softmax, F.log_softmax, F.softmin):
        assert region.run(fn, x, 1, 3, asked).dtype is (asked or torch.float32)
    for fn in (torch.cumsum, torch.sum, torch.prod):
        assert region.run(fn, x, 1, dtype=asked).dtype is (asked or torch.float32)


OF_PRODUCTS = [
    *(torch.pinverse, torch.linalg.pinv, torch.matrix_exp, torch.linalg.matrix_exp),
    *(torch.cov, torch.corrcoef),
]


@pytest.mark.parametrize("function", OF_PRODUCTS)
def test_functions_made_of_products_are_fp32_and_so_their_gradients(region, low, device, function):
    values = torch.tensor([[2.0, 1.0, 0.5], [0.25, 3.0, 1.0], [1.0, 0.5, 4.0]], device=device)
    for dtype in (torch.float32, low):
        x = values.to(dtype, copy=True).requires_grad_()
        got = region.run(function, x)
        (grad,) = torch.autograd.grad(got[0, 1], x)
        plain = values.clone().requires_grad_()
        expected = function(plain)
        (exact,) = torch.autograd.grad(expected[0, 1], plain)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(grad, exact.to(dtype))


WITH_NUMBERS = {
    "sub": lambda x, one: torch.sub(x, one, alpha=2),
    "addcmul": lambda x, one: torch.addcmul(x, one, one, value=0.5),
    "baddbmm": lambda x, one: torch.baddbmm(one, one, x, beta=0.5),
}


@pytest.mark.parametrize("function", WITH_NUMBERS.values(), ids=WITH_NUMBERS)
@pytest.mark.parametrize("device", ["cpu"])  # the emulated one has no tensors without memory
@pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning")  # torch's own, of its formulas
def test_forward_mode_multiplies_the_zeros_of_constants_by_numbers(region, low, device, function):
    x, one = torch.ones(1, 2, 2, device=device), torch.ones(1, 2, 2, device=device)
    got = region.run(torch.func.jvp, lambda x: function(x, one), (x,), (one,))
    expected = torch.func.jvp(lambda x: function(x, one), (x,), (one,))
    assert [*map(torch.Tensor.tolist, got)] == [*map(torch.Tensor.tolist, expected)]


def test_a_kernel_of_torch_may_work_in_place_on_memory_of_its_own(region, low, device):
    x = torch.ones(2, 3, device=device, dtype=low)
    out = torch.empty(2, device=device, dtype=low)
    region.run(torch.logsumexp, x, 1, out=out)
    assert out.tolist() == torch.logsumexp(x, 1).tolist()


def test_mean_keeps_low_precision_and_batch_norm_follows_its_input(region, low, device):
    x = torch.randn(4, 2, device=device)
    assert region.run(torch.mean, x.to(low)).dtype is low
    norm = nn.BatchNorm1d(2).to(device)
    assert region.run(norm, x.to(low)).dtype is low
    assert region.run(norm, x).dtype is torch.float32


def _unpool(pooled):
    indices = torch.arange(pooled.numel(), device=pooled.device).view_as(pooled)
    unpool = F.max_unpool2d if pooled.dim() == 3 else F.max_unpool3d
    return unpool(pooled, indices, 2)


_quantize = torch.fake_quantize_per_tensor_affine
KEEPING = {
    "reflection_pad1d": (lambda x: F.pad(x, (1, 1), "reflect"), (2, 3, 4)),
    "reflection_pad2d": (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), (2, 3, 4, 4)),
    "replication_pad1d": (lambda x: F.pad(x, (1, 1), "replicate"), (2, 3, 4)),
    "replication_pad2d": (lambda x: F.pad(x, (1, 1, 1, 1), "replicate"), (2, 3, 4, 4)),
    "replication_pad3d": (lambda x: F.pad(x, (1,) * 6, "replicate"), (1, 2, 4, 4, 4)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (1, 2, 4, 4, 4)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (1, 2, 4, 4, 4)),
    "max_unpool2d": (_unpool, (1, 2, 2)),
    "max_unpool3d": (_unpool, (1, 2, 2, 2)),
    "fake_quantize_per_tensor_affine": (lambda x: _quantize(x, 0.125, 0, -127, 127), (2, 3)),
}


def test_what_moves_values_keeps_its_dtype_on_every_device(region, low, device):
    """torch's own autocast runs these in fp32 on a CPU, and nowhere else."""
    for (fn, shape), dtype in itertools.product(KEEPING.values(), (low, torch.float32)):
        x = torch.randn(shape, device=device).to(dtype).requires_grad_()
        result = region.run(fn, x)
        assert result.dtype is dtype
        torch.testing.assert_close(result, fn(x.float()).to(dtype), rtol=0, atol=0)
        result.sum().backward()
        assert x.grad.dtype is dtype


def test_a_spectral_layer_gets_gradients(region, low, device):
    x = torch.randn(3, 6, device=device).to(low).requires_grad_()

    def mixed(x):
        return torch.fft.ifft(torch.fft.fft(x) * 2).real

    result = region.run(mixed, x)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, 2 * x.float())
    result.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_integers_and_complex_are_left_alone(region, device):
    ones = torch.ones(2, dtype=torch.int32, device=device)
    assert region.run(torch.sum, ones).dtype is torch.int64
    z = torch.ones(2, 2, dtype=torch.complex64, device=device)
    assert region.run(torch.einsum, "ij,jk->ik", z, z).dtype is torch.complex64
    assert region.run(torch.exp, z).dtype is torch.complex64


def test_out_variants_keep_the_dtype_of_out(region, low, device):
    x = torch.ones(2, device=device).to(low)
    out = torch.empty_like(x)
    assert region.run(torch.exp, x, out=out) is out
    assert out.dtype is low


def test_functorch_transforms_see_the_casts(region, low, device):
    x = torch.ones(2, 2, device=device).to(low)
    assert region.run(torch.func.vmap(torch.exp), x).dtype is torch.float32
    gradient = region.run(torch.func.grad(lambda x: torch.exp(x).sum()), x)
    torch.testing.assert_close(gradient, x.float().exp().to(low))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}], ids=str)
def test_cross_entropy_is_that_of_fp32_logits(region, low, device, options):
    logits = (torch.randn(8, 10, device=device) * 10).to(low).requires_grad_()
    full = logits.detach().float().requires_grad_()
    for target in (torch.randint(10, (8,)), torch.rand(8, 10).softmax(1)):
        loss = region.run(F.cross_entropy, logits, target.to(device), **options)
        expected = F.cross_entropy(full, target.to(device), **options)
        torch.testing.assert_close(loss, expected)
        (grad,) = torch.autograd.grad(loss, logits)
        (exact,) = torch.autograd.grad(expected, full)
        torch.testing.assert_close(grad, exact.to(low))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multi_head_attention_runs_in_low_precision(region, low, device, mode):
    module = nn.MultiheadAttention(4, 2, batch_first=True).to(device).train(mode == "train")
    x = torch.randn(2, 3, 4, device=device)
    for weights in (True, False):
        assert region.run(module, x, x.to(low), x, need_weights=weights)[0].dtype is low
