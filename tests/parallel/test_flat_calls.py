"""Flat calls: one collective for many tensors."""

import pytest
import torch
import torch.distributed as dist

from apex.parallel import distributed as d

HALF, BF16, FLOAT, DOUBLE = (
    torch.ones(2, dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)
two_ranks = pytest.mark.distributed


def test_flatten_and_unflatten_are_inverse():
    bucket = [torch.randn(2, 3), torch.randn(4), torch.randn(1, 1)]
    flat = d.flatten(bucket)
    assert flat.shape == (11,)
    for view, tensor in zip(d.unflatten(flat, bucket), bucket, strict=True):
        assert torch.equal(view, tensor)


def test_unflatten_gives_views():
    bucket = [torch.zeros(2), torch.zeros(3)]
    flat = d.flatten(bucket)
    d.unflatten(flat, bucket)[1].fill_(7.0)
    assert flat.tolist() == [0, 0, 7, 7, 7]


def test_split_half_float_double_orders_by_dtype_without_empty_lists():
    split = d.split_half_float_double([FLOAT, DOUBLE, HALF, FLOAT])
    assert [[t.dtype for t in bucket] for bucket in split] == [
        [torch.float16],
        [torch.float32] * 2,
        [torch.float64],
    ]


def test_split_half_float_double_takes_bfloat16():
    assert d.split_half_float_double([BF16]) == [[BF16]]


def test_split_by_type_keys_by_torchs_type_name_in_order_of_appearance():
    split = d.split_by_type([FLOAT, HALF, FLOAT])
    assert list(split) == ["torch.FloatTensor", "torch.HalfTensor"]
    assert len(split["torch.FloatTensor"]) == 2


def test_extract_tensors_finds_tensors_in_any_nesting_and_skips_the_rest():
    found = []
    d.extract_tensors([FLOAT, (HALF, {"no": 1}, None, "text"), iter([DOUBLE])], found)
    assert [t.dtype for t in found] == [torch.float32, torch.float16, torch.float64]


def average(rank):
    tensors = [torch.full((2,), rank + 1.0), torch.full((1, 2), rank + 3.0).half()]
    d.flat_dist_call(tensors, dist.all_reduce)
    return tensors


@two_ranks
def test_all_reduce_averages_in_place(on_two_ranks):
    for first, second in on_two_ranks(average):
        assert first.tolist() == [1.5, 1.5]
        assert second.tolist() == [[3.5, 3.5]]


def broadcast(rank):
    tensors = [torch.full((2,), rank), torch.full((2,), float(rank))]
    d.flat_dist_call(tensors, dist.broadcast, (1,))
    return tensors


@two_ranks
def test_extra_arguments_reach_the_call_and_other_calls_do_not_divide(on_two_ranks):
    for integers, floats in on_two_ranks(broadcast):
        assert integers.tolist() == [1, 1]
        assert floats.tolist() == [1.0, 1.0]


def largest(rank):
    tensor = torch.tensor([rank + 1.0, 5.0 - rank])
    d.apply_flat_dist_call([tensor], dist.all_reduce, (dist.ReduceOp.MAX,))
    return tensor


@two_ranks
def test_a_maximum_is_not_divided(on_two_ranks):
    for tensor in on_two_ranks(largest):
        assert tensor.tolist() == [2.0, 5.0]


def in_own_group(rank):
    groups = [dist.new_group([0]), dist.new_group([1])]
    tensor = torch.tensor([rank + 1.0])
    d.apply_flat_dist_call([tensor], dist.all_reduce, (dist.ReduceOp.SUM, groups[rank]))
    return tensor


@two_ranks
def test_an_average_is_over_the_group_given(on_two_ranks):
    assert [t.item() for t in on_two_ranks(in_own_group)] == [1.0, 2.0]


def integers(rank):
    tensor = torch.tensor([rank])
    with pytest.raises(TypeError, match=r"torch\.int64 to average"):
        d.flat_dist_call([tensor], dist.all_reduce)
    return tensor.item()


@two_ranks
def test_an_average_of_integers_is_refused(on_two_ranks):
    assert on_two_ranks(integers) == [0, 1]


def test_without_a_process_group_it_is_refused():
    with pytest.raises(RuntimeError, match="flat_dist_call needs a process group"):
        d.flat_dist_call([FLOAT], dist.all_reduce)
