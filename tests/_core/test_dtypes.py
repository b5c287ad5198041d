"""The floating-point cast rule."""

import pytest
import torch

from apex._core import dtypes

CASTABLE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", CASTABLE)
def test_the_four_floating_types_are_castable(dtype):
    assert dtypes.is_castable(torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize("dtype", OTHERS)
def test_no_other_type_is_castable(dtype):
    assert not dtypes.is_castable(torch.zeros(1).to(dtype))


@pytest.mark.parametrize("to", CASTABLE)
@pytest.mark.parametrize("dtype", CASTABLE)
def test_a_castable_tensor_is_cast(dtype, to):
    assert dtypes.cast(torch.zeros(1, dtype=dtype), to).dtype is to


@pytest.mark.parametrize("dtype", OTHERS)
def test_any_other_tensor_comes_back_itself(dtype):
    tensor = torch.zeros(1).to(dtype)
    assert dtypes.cast(tensor, torch.float16) is tensor


def test_a_tensor_of_the_type_comes_back_itself():
    tensor = torch.zeros(1)
    assert dtypes.cast(tensor, torch.float32) is tensor


def test_gradients_flow_through_a_cast():
    tensor = torch.ones(2, requires_grad=True)
    dtypes.cast(tensor, torch.bfloat16).sum().backward()
    assert torch.equal(tensor.grad, torch.ones(2))


@pytest.mark.parametrize("dtype", [*CASTABLE, *OTHERS])
def test_low_precision_is_fp16_and_bf16(dtype):
    expected = dtype in (torch.float16, torch.bfloat16)
    assert dtypes.is_low_precision(torch.zeros(1).to(dtype)) is expected


def test_the_name_of_a_type_is_without_its_module():
    assert dtypes.name(torch.bfloat16) == "bfloat16"
