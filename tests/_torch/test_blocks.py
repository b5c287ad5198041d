"""Lists of tensors in blocks."""

import pytest
import torch

from apex._torch import blocks
from tests.training.cases import same

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(blocks, "_LEAST", 32)


@pytest.mark.parametrize("sizes", [[5], [32], [33], [100, 3, 0, 31, 64, 1], [0], [], [7] * 40])
def test_every_element_is_in_one_block_and_small_tensors_stay_whole(sizes):
    seen = [torch.zeros(size) for size in sizes]
    for block in blocks.cut(sizes, CPU):
        assert sum(part.stop - part.start for part in block) <= 32
        for part in block:
            part.of(seen).add_(1)
            assert part.whole is (sizes[part.position] <= 32)
            assert part.start % 32 == 0
    assert all(tensor.eq(1).all() for tensor in seen)


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

    def load(block, values):
        torch._foreach_copy_(values, [part.of(stored) for part in block])

    def store(block, values):
        torch._foreach_copy_([part.of(stored) for part in block], values)

    def kernel(own, buffered, nothing):
        assert nothing == []
        assert [v.stride() for v in own] == [v.stride() for v in buffered]
        torch._foreach_mul_(buffered, 2.0)
        torch._foreach_add_(own, buffered)

    monkeypatch.setitem(blocks.OPERANDS, kernel, 3)
    buffered = blocks.Buffered(sums, load, store)
    blocks.run(kernel, [sums, stored, []], {}, blocks.InPlace(sums), buffered)
    assert same(sums, expected)
    assert same([low.float() for low in stored], expected)


def test_only_tensors_that_are_laid_out_alike_are_cut_alike():
    tensor = torch.zeros(2, 3, 4, 5)
    assert blocks.same_strides(tensor, torch.ones(2, 3, 4, 5))
    for other in (
        tensor.to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 5, 4),
        torch.zeros(2, 3, 4, 5, device="meta"),
    ):
        assert not blocks.same_strides(other, tensor)
    gaps = torch.zeros(4, 4)[:, :2]
    assert not blocks.same_strides(gaps, gaps)
