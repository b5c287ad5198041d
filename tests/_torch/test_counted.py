"""Gradients that count the writes of foreach functions, and are plain tensors otherwise."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from apex._torch.counted import count_writes, uncount_writes
from tests.training.test_cost import HostReads


@pytest.fixture
def grad():
    made = torch.ones(3, dtype=torch.float16)
    count_writes(made)
    return made


@pytest.mark.parametrize(
    "write",
    [
        lambda grad: torch._foreach_mul_([grad], 0.5),
        lambda grad: torch._foreach_mul_([torch.ones(2), grad], torch.tensor(0.5)),
        lambda grad: torch._foreach_zero_((grad,)),
        lambda grad: torch._foreach_copy_([grad], [torch.zeros(3)]),
        lambda grad: torch._foreach_mul_([grad.data], 0.5),
        lambda grad: grad.data.mul_(0.5),
        lambda grad: setattr(grad, "data", torch.zeros(3, dtype=torch.float16)),
    ],
)
def test_writes_that_torch_does_not_count_do(grad, write):
    before = grad._version
    with HostReads():  # below a dispatch mode they do not count on a CPU either
        write(grad)
    assert grad._version > before


@pytest.mark.parametrize(
    "read",
    [
        lambda grad: torch._foreach_norm([grad]),
        lambda grad: torch._foreach_copy_([torch.zeros(3)], [grad]),
        lambda grad: grad.float().sum(),
    ],
)
def test_reads_do_not_count(grad, read):
    before = grad._version
    read(grad)
    assert grad._version == before


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_it_counts(grad, foreach):
    param = nn.Parameter(torch.ones_like(grad))
    param.grad = grad
    before = grad._version
    with HostReads():
        nn.utils.clip_grad_norm_([param], 0.5, foreach=foreach)
    assert grad._version > before


def saved(grad):
    buffer = io.BytesIO()
    torch.save(grad, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()))


@pytest.mark.parametrize(
    "made",
    [
        copy.deepcopy,
        saved,
        lambda grad: pickle.loads(pickle.dumps(grad)),
        lambda grad: grad * 1,
        lambda grad: grad.clone(),
        lambda grad: torch._foreach_mul([grad], 1)[0],
    ],
)
def test_copies_and_results_are_plain(grad, made):
    result = made(grad)
    assert type(result) is torch.Tensor
    assert torch.equal(result, torch.ones(3, dtype=torch.float16))
    assert repr(grad) == repr(result)


def test_it_becomes_plain_again(grad):
    uncount_writes(grad)
    assert type(grad) is torch.Tensor


def test_other_subclasses_stay(grad):
    param = nn.Parameter(torch.ones(3))
    count_writes(param)
    assert type(param) is nn.Parameter
