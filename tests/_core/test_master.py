"""Pairs of parameter and master: values out, gradients in."""

import pytest
import torch
from torch import nn

from apex._core import master

LOW = [torch.float16, torch.bfloat16]


def param(values, dtype=torch.float32, grad=None):
    own = nn.Parameter(torch.tensor(values, dtype=dtype))
    if grad is not None:
        own.grad = torch.tensor(grad, dtype=dtype)
    return own


def sparse(rows, values, dtype=torch.float32):
    values = torch.tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor([rows], values, (3,), check_invariants=True)


@pytest.mark.parametrize("dtype", LOW)
def test_a_master_has_the_parameters_value_in_fp32(dtype):
    made = master.make_master(param([1 / 3], dtype))
    assert made.dtype is torch.float32
    assert torch.equal(made, param([1 / 3], dtype).float())


@pytest.mark.parametrize("dtype", LOW)
def test_a_master_takes_the_exact_value_without_a_copy(dtype):
    exact = torch.tensor([1 / 3])
    made = master.make_master(param([1 / 3], dtype), exact)
    assert torch.equal(made, exact)
    assert made.data_ptr() == exact.data_ptr()


@pytest.mark.parametrize("dtype", LOW)
def test_copying_rounds_every_master_into_its_parameter(dtype):
    models = [param([0.0, 0.0], dtype), param([0.0])]
    masters = [param([1 / 3, 2.0]), param([3.0])]
    master.copy_to_model(masters, models)
    assert all(torch.equal(m, own.to(m.dtype)) for m, own in zip(models, masters, strict=True))


@pytest.mark.parametrize("dtype", LOW)
def test_gradients_come_as_fp32_copies(dtype):
    own = param([0.0, 0.0], dtype, grad=[1.5, -2.0])
    (grad,) = master.copy_grads([own], [param([0.0, 0.0])])
    grad.mul_(2)
    assert torch.equal(grad, torch.tensor([3.0, -4.0]))
    assert torch.equal(own.grad, torch.tensor([1.5, -2.0], dtype=dtype))


def test_duplicate_sparse_rows_are_summed_in_fp32():
    own = param([0.0, 0.0, 0.0], torch.float16)
    own.grad = sparse([1, 1], [60000.0, 60000.0], torch.float16)
    (grad,) = master.copy_grads([own], [param([0.0, 0.0, 0.0])])
    assert grad.is_coalesced()
    assert torch.equal(grad.to_dense(), torch.tensor([0.0, 120000.0, 0.0]))


def test_masters_get_the_gradients_of_their_parameters_and_no_others():
    models = [param([0.0], torch.float16), param([0.0], torch.float16, grad=[2.0])]
    masters = [param([0.0], grad=[7.0]), param([0.0])]
    (copy,) = master.copy_grads(models, masters)
    assert masters[0].grad is None
    assert masters[1].grad is copy


def test_sums_are_made_in_the_memory_of_the_values():
    values, addends = [torch.tensor([1.0]), torch.tensor([5.0])], [torch.tensor([2.0]), None]
    first, second = master.sums(values, addends)
    assert first is values[0]
    assert first == 3.0
    assert second is values[1]
    assert addends[0] == 2.0


@pytest.mark.parametrize("first_sparse", [True, False])
@pytest.mark.parametrize("second_sparse", [True, False])
def test_sparse_and_dense_gradients_add_up_in_any_order(first_sparse, second_sparse):
    dense = torch.tensor([1.0, 0.0, 1.0])
    first = sparse([0, 1], [2.0, 2.0]) if first_sparse else dense.clone()
    second = sparse([0, 1], [2.0, 2.0]) if second_sparse else dense.clone()
    expected = first.to_dense() + second.to_dense()
    (total,) = master.sums([first], [second])
    assert torch.equal(total.to_dense(), expected)


def test_fp32_gradients_have_the_layout_that_is_asked_for():
    param = torch.nn.Parameter(torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16))
    param.grad = torch.randn(2, 3, 4, 4).bfloat16().to(memory_format=torch.channels_last)
    (grad,) = master.fp32_copies([param.grad], [param], [torch.zeros(2, 3, 4, 4)])
    assert grad.is_contiguous()
    assert torch.equal(grad, param.grad.float())


def test_fp32_gradients_have_the_layout_of_their_parameter():
    param = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    param.grad = torch.arange(6.0, dtype=torch.bfloat16).view(3, 2).t()
    (grad,) = master.copy_grads([param], [master.make_master(param)])
    assert grad.stride() == param.stride()
    assert torch.equal(grad, param.grad.float())
