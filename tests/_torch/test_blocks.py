"""Lists of tensors in blocks."""

import pytest
import torch

from apex._torch import blocks
from tests.training.cases import same

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(blocks, "_LEAST", 32)


@pytest.mark.parametrize("sizes", [[5], [32], [33], [100, 3, 0, 31, 64, 1], [0], [7] * 40])
def test_every_element_is_in_one_block_and_small_tensors_stay_whole(sizes):
    seen = [torch.zeros(size) for size in sizes]
    cuts = blocks.cuts(seen)
    pieces = cuts.of_all(seen)
    for block in cuts.blocks:
        assert 0 < sum(piece.numel() for piece in pieces[block]) <= cuts.greatest <= 32
        ends = [*cuts.offsets[block][1:], cuts.greatest]
        for tensor, piece, start, end in zip(
            cuts.each(seen)[block], pieces[block], cuts.offsets[block], ends, strict=True
        ):
            piece.add_(1)
            assert (piece is tensor) is (tensor.numel() <= 32)
            assert piece.numel() <= end - start
            assert piece.storage_offset() % 32 == 0
    assert all(tensor.eq(1).all() for tensor in seen)


def test_small_tensors_fill_what_large_ones_leave_unless_the_order_counts():
    tensors = [torch.zeros(size) for size in (16, 32, 16, 70, 10)]
    filled, in_order = blocks.cuts(tensors), blocks.cuts(tensors, in_order=True)
    assert [len(cuts.blocks) for cuts in (filled, in_order)] == [5, 6]
    assert [id(piece) for piece in filled.of_all(tensors)[:2]] == [id(tensors[0]), id(tensors[2])]
    assert [piece.numel() for piece in in_order.of_all(tensors)] == [16, 32, 16, 32, 32, 6, 10]


def test_blocks_of_a_device_hold_a_share_of_all_elements():
    cuda = torch.device("cuda")
    assert blocks.elements(10, cuda) == 32
    assert blocks.elements(32 * 640, cuda) == 640
    assert blocks.elements(2**40, cuda) == 2**24


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_sees_buffered_and_own_operands_alike(layout, monkeypatch):
    shapes = [(2, 3, 4, 5), (1, 2, 2, 2), (3, 2, 1, 1)]
    stored = [torch.randn(s).bfloat16().to(memory_format=layout) for s in shapes]
    sums = [torch.zeros(s).to(memory_format=layout) for s in shapes]
    expected = [2 * low.float() for low in stored]

    cuts = blocks.cuts(sums)
    pieces = cuts.of_all(stored)

    def load(block, values):
        torch._foreach_copy_(values, pieces[block])

    def store(block, values):
        torch._foreach_copy_(pieces[block], values)

    def kernel(own, buffered, nothing):
        assert nothing == []
        assert [v.stride() for v in own] == [v.stride() for v in buffered]
        torch._foreach_mul_(buffered, 2.0)
        torch._foreach_add_(own, buffered)

    monkeypatch.setitem(blocks.OPERANDS, kernel, 3)
    monkeypatch.setattr(blocks, "function_of", lambda func: func)
    buffered = blocks.Buffered(cuts, pieces, load, store)
    own = blocks.InPlace(cuts.of_all(sums))
    blocks.run(kernel, [sums, stored, []], {}, cuts, own, buffered)
    assert same(sums, expected)
    assert same([low.float() for low in stored], expected)


def test_only_tensors_that_are_laid_out_alike_are_cut_alike():
    tensor = torch.zeros(2, 3, 4, 5)
    gaps = torch.zeros(4, 4)[:, :2]
    pairs = [
        (tensor, torch.ones(2, 3, 4, 5)),
        (tensor, tensor.to(memory_format=torch.channels_last)),
        (tensor, torch.zeros(2, 3, 5, 4)),
        (tensor, torch.zeros(2, 3, 4, 5, device="meta")),
        (tensor, tensor.to_sparse()),
        (gaps, gaps),
    ]
    firsts, seconds = map(list, zip(*pairs, strict=True))
    assert blocks.alike(firsts, seconds) == [True, False, False, False, False, False]
    assert blocks.alike(firsts, firsts, seconds)[:2] == [True, False]
