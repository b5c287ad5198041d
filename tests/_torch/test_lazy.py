"""A lazy tensor settles its source before an operator notices a difference."""

import copy

import pytest
import torch
from torch import nn

from apex._torch import lazy


class Source:
    """A source whose values are to be doubled."""

    def __init__(self, pending):
        self.values = torch.arange(4.0)
        self.pending = pending
        self.settled = 0

    def settle(self):
        if self.pending:
            self.values.mul_(2)
        self.pending = False
        self.settled += 1


def made(pending):
    source = Source(pending)
    return source, lazy.make(source)


@pytest.mark.parametrize("pending", [False, True])
def test_reads_settle_what_is_pending_and_nothing_else(pending):
    source, tensor = made(pending)
    assert tensor.shape == (4,)
    assert tensor.dtype is torch.float32
    assert tensor.is_leaf
    assert source.settled == 0
    assert tensor.sum() == 6.0 * (1 + pending)
    assert type(tensor * 2) is torch.Tensor
    assert source.settled == pending


WRITES = {
    "mul_": lambda t: t.mul_(1),
    "foreach": lambda t: torch._foreach_mul_([t], 1.0),
    "out": lambda t: torch.mul(t, 1, out=t),
    "item": lambda t: t.__setitem__(0, 0.0),
    "view": lambda t: t.view(2, 2),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("way", WRITES)
def test_writes_and_aliases_settle_first(way, pending):
    source, tensor = made(pending)
    before = tensor._version
    result = WRITES[way](tensor)
    assert source.settled
    assert not isinstance(result, lazy.LazyTensor) or result is tensor
    if way in ("mul_", "foreach", "out", "item"):
        assert tensor._version > before
    assert tensor.tolist() == [value * (1 + pending) for value in range(4)]


def test_a_source_operand_that_another_tensor_is_written_from_is_only_read():
    source, tensor = made(pending=False)
    target = torch.zeros(4)
    torch._foreach_copy_([target], [tensor])
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert source.settled == 0


@pytest.mark.parametrize("pending", [False, True])
def test_autograd_adds_to_a_lazy_gradient_in_c(pending):
    source, tensor = made(pending)
    param = nn.Parameter(torch.zeros(4))
    param.grad = tensor
    (param * 1.0).sum().backward()
    assert source.settled == 1
    assert param.grad.tolist() == [value * (1 + pending) + 1 for value in range(4)]
