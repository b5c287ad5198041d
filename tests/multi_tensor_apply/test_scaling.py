"""Scaling and sums against plain loops."""

import pytest
import torch

import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
from tests.multi_tensor_apply.lists import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    INF,
    NAN,
    assert_same,
    clones,
    flag,
    like,
    tensors,
)
from tests.optimizers import cases

dtypes_in = pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
dtypes_out = pytest.mark.parametrize("target_dtype", DTYPES, ids=str)


@dtypes_in
@dtypes_out
def test_scale_is_computed_in_fp32_and_rounded_once(source_dtype, target_dtype):
    sources = tensors(source_dtype)
    targets = like(sources, target_dtype)
    overflow = flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [sources, targets], 1 / 3)
    factor = torch.tensor(1 / 3, dtype=FP32)
    assert_same(targets, [(s.float() * factor).to(target_dtype) for s in sources])
    assert overflow.item() == 0


def test_scale_takes_several_dtypes_in_one_list():
    sources = tensors(FP16) + tensors(FP32) + tensors(BF16)
    targets = like(tensors(FP32)) + like(tensors(FP16)) + like(tensors(BF16))
    amp_C.multi_tensor_scale(65536, flag(), [sources, targets], 0.5)
    assert_same(
        targets, [(s.float() * 0.5).to(t.dtype) for s, t in zip(sources, targets, strict=True)]
    )


@dtypes_in
def test_scale_in_place(source_dtype):
    sources = tensors(source_dtype)
    expected = [s * 4.0 for s in sources]
    amp_C.multi_tensor_scale(65536, flag(), [sources, sources], 4.0)
    assert_same(sources, expected)


def test_scale_leaves_its_sources():
    sources = tensors(FP32)
    before = clones(sources)
    amp_C.multi_tensor_scale(65536, flag(), [sources, like(sources)], 4.0)
    assert_same(sources, before)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scale_by_a_tensor_reads_nothing_on_the_host(shape):
    sources = tensors(FP32)
    targets = like(sources)
    overflow, factor = flag(), torch.full(shape, 0.25)
    with cases.HostReads() as reads:
        amp_C.multi_tensor_scale(65536, overflow, [sources, targets], factor)
    assert reads.count == 0
    assert_same(targets, [s * 0.25 for s in sources])


@dtypes_in
@dtypes_out
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_scale_raises_the_flag_for_a_source_that_is_not_finite(source_dtype, target_dtype, value):
    sources = tensors(source_dtype)
    sources[1][3] = value
    targets = like(sources, target_dtype)
    overflow = flag()
    amp_C.multi_tensor_scale(65536, overflow, [sources, targets], 1.0)
    assert overflow.item() == 1
    torch.testing.assert_close(targets[1][3].float(), torch.tensor(value), equal_nan=True)


def test_scale_keeps_a_flag_that_is_up_and_works_on():
    sources = tensors(FP32)
    targets = like(sources)
    overflow = flag(1)
    amp_C.multi_tensor_scale(65536, overflow, [sources, targets], 2.0)
    assert overflow.item() == 1
    assert_same(targets, [s * 2.0 for s in sources])


def test_scale_that_overflows_its_target_raises_no_flag():
    overflow = flag()
    target = torch.zeros(1, dtype=FP16)
    amp_C.multi_tensor_scale(65536, overflow, [[torch.tensor([60000.0])], [target]], 10.0)
    assert (overflow.item(), target.item()) == (0, INF)


def test_scale_writes_views_of_a_flat_tensor():
    sources = tensors(FP32)
    flat = torch.zeros(sum(s.numel() for s in sources), dtype=FP16)
    views = [
        v.view(s.shape)
        for v, s in zip(flat.split([s.numel() for s in sources]), sources, strict=True)
    ]
    amp_C.multi_tensor_scale(65536, flag(), [sources, views], 2.0)
    assert_same([flat], [torch.cat([(s * 2.0).half().flatten() for s in sources])])


def test_scale_writes_transposed_targets():
    source, target = torch.randn(3, 4), torch.zeros(4, 3).t()
    amp_C.multi_tensor_scale(65536, flag(), [[source], [target]], 2.0)
    assert torch.equal(target, source * 2.0)


@dtypes_in
@dtypes_out
def test_axpby_is_computed_in_fp32_and_rounded_once(source_dtype, target_dtype):
    xs, ys = tensors(source_dtype), tensors(BF16, seed=1)
    targets = like(xs, target_dtype)
    args = (0.75, -0.5, -1)
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag(), [xs, ys, targets], *args)
    assert_same(
        targets,
        [
            (0.75 * x.float() - 0.5 * y.float()).to(target_dtype)
            for x, y in zip(xs, ys, strict=True)
        ],
    )


@pytest.mark.parametrize("place", [0, 1])
def test_axpby_may_write_one_of_its_inputs(place):
    lists = [tensors(FP32), tensors(FP32, seed=1)]
    expected = [2.0 * x + 3.0 * y for x, y in zip(*lists, strict=True)]
    amp_C.multi_tensor_axpby(65536, flag(), [*lists, lists[place]], 2.0, 3.0, -1)
    assert_same(lists[place], expected, rtol=1e-6, atol=1e-7)


def test_axpby_by_tensors():
    xs, ys, targets = tensors(FP32), tensors(FP32, seed=1), like(tensors(FP32))
    a, b = torch.tensor([2.0]), torch.tensor(3.0)
    amp_C.multi_tensor_axpby(65536, flag(), [xs, ys, targets], a, b, -1)
    assert_same(targets, [2.0 * x + 3.0 * y for x, y in zip(xs, ys, strict=True)])


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize(
    ("arg_to_check", "bad", "raised"),
    [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1), (-1, 0, 1), (-1, 1, 1)],
)
def test_axpby_raises_the_flag_for_the_input_that_is_checked(arg_to_check, bad, raised, value):
    lists = [tensors(FP16), tensors(FP32, seed=1)]
    lists[bad][0][1, 1] = value
    overflow = flag()
    amp_C.multi_tensor_axpby(65536, overflow, [*lists, like(lists[1])], 1.0, 1.0, arg_to_check)
    assert overflow.item() == raised


def test_axpby_refuses_another_input_to_check():
    lists = [tensors(FP32)] * 3
    with pytest.raises(ValueError, match="arg_to_check=2"):
        amp_C.multi_tensor_axpby(65536, flag(), lists, 1.0, 1.0, 2)
