"""Norms against plain loops."""

import math

import pytest
import torch

import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
from tests.multi_tensor_apply.lists import (
    DTYPES,
    FP16,
    FP32,
    FP64,
    INF,
    NAN,
    assert_same,
    clones,
    flag,
    like,
    tensors,
)

dtypes_in = pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
dtypes_out = pytest.mark.parametrize("target_dtype", DTYPES, ids=str)


def plain_norms(values, factor=1.0):
    each = torch.stack([(v.double() * factor).square().sum().sqrt() for v in values]).float()
    return each.double().square().sum().sqrt().float().reshape(1), each


@pytest.mark.parametrize("name", ["multi_tensor_l2norm", "multi_tensor_l2norm_mp"])
@pytest.mark.parametrize("dtype", [*DTYPES, FP64], ids=str)
def test_l2norm_is_that_of_the_plain_loop(name, dtype):
    values, overflow = tensors(dtype), flag()
    norm, each = multi_tensor_applier(getattr(amp_C, name), overflow, [values], True)
    assert_same((norm, each), plain_norms(values), rtol=1e-5, atol=0)
    assert (norm.dtype, each.dtype, overflow.item()) == (FP32, FP32, 0)


def test_l2norm_takes_several_dtypes_in_one_list():
    values = [v for dtype in (*DTYPES, FP64) for v in tensors(dtype)]
    norm, each = amp_C.multi_tensor_l2norm(65536, flag(), [values], True)
    assert_same((norm, each), plain_norms(values), rtol=1e-5, atol=0)


@pytest.mark.parametrize("per_tensor", [False, None])
def test_l2norm_has_no_norms_per_tensor_unless_asked(per_tensor):
    norm, each = amp_C.multi_tensor_l2norm(65536, flag(), [tensors(FP32)], per_tensor)
    assert (norm.shape, each.shape) == ((1,), (0,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2norm_of_many_elements_is_that_of_fp64(dtype):
    """torch's own on a CPU adds squares one by one, and is 1e-4 off here."""
    many = torch.rand(2**22 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    few = torch.ones(5, dtype=dtype)
    norm, each = amp_C.multi_tensor_l2norm(65536, flag(), [[few, many, few]], True)
    expected = [t.double().norm().item() for t in (few, many, few)]
    assert each.tolist() == pytest.approx(expected, rel=5e-6)
    assert norm.item() == pytest.approx(sum(e * e for e in expected) ** 0.5, rel=5e-6)


def test_l2norm_of_fp16_does_not_overflow_in_fp16():
    overflow = flag()
    norm, _ = amp_C.multi_tensor_l2norm(65536, overflow, [[torch.full((4,), 4e4, dtype=FP16)]])
    assert math.isclose(norm.item(), 8e4, rel_tol=1e-3)
    assert overflow.item() == 0


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("name", ["multi_tensor_l2norm", "multi_tensor_l2norm_mp"])
def test_l2norm_raises_the_flag_if_it_is_not_finite(name, value):
    values, overflow = tensors(FP32), flag()
    values[0][0, 0] = value
    norm, _ = getattr(amp_C, name)(65536, overflow, [values])
    assert overflow.item() == 1
    assert not torch.isfinite(norm).any()


@dtypes_in
@dtypes_out
def test_l2norm_scale_returns_norms_of_sources_and_writes_products(source_dtype, target_dtype):
    sources = tensors(source_dtype)
    targets = like(sources, target_dtype)
    lists = [sources, targets]
    found = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, flag(), lists, 0.5, True)
    assert_same(found, plain_norms(sources), rtol=1e-5, atol=0)
    assert_same(targets, [(s.float() * 0.5).to(target_dtype) for s in sources])


@pytest.mark.parametrize("inv_scale", [1 / 128, torch.tensor([1 / 128])], ids=["float", "tensor"])
@dtypes_in
def test_unscale_l2norm_is_the_norm_of_the_products(source_dtype, inv_scale):
    values = tensors(source_dtype)
    before = clones(values)
    found = multi_tensor_applier(
        amp_C.multi_tensor_unscale_l2norm, flag(), [values], inv_scale, True
    )
    assert_same(found, plain_norms(values, 1 / 128), rtol=1e-5, atol=0)
    assert_same(values, before)


def test_unscale_l2norm_overflows_only_if_the_unscaled_norm_does():
    overflow = flag()
    inverse = torch.tensor([1e-10])
    norm, _ = amp_C.multi_tensor_unscale_l2norm(65536, overflow, [[torch.tensor([1e25])]], inverse)
    assert math.isclose(norm.item(), 1e15, rel_tol=1e-5)
    assert overflow.item() == 0
