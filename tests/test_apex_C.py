"""Flat tensors and back."""

import pytest
import torch

import apex_C


def tensors(dtype=torch.float32):
    return [torch.randn(2, 3).to(dtype), torch.randn(()).to(dtype), torch.zeros(0, 2, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unflatten_undoes_flatten(dtype):
    parts = tensors(dtype)
    flat = apex_C.flatten(parts)
    assert (flat.shape, flat.dtype) == ((7,), dtype)
    for part, back in zip(parts, apex_C.unflatten(flat, parts), strict=True):
        assert torch.equal(part, back)


def test_flat_tensor_is_a_copy():
    part = torch.zeros(3)
    apex_C.flatten([part]).fill_(1.0)
    assert torch.equal(part, torch.zeros(3))


def test_unflatten_gives_views():
    parts = tensors()
    flat = torch.zeros(7, dtype=torch.float16)
    views = apex_C.unflatten(flat, parts)
    assert isinstance(views, list)
    views[0].fill_(1.0)
    assert flat.tolist() == [1.0] * 6 + [0.0]


def test_flatten_follows_the_logical_order():
    assert apex_C.flatten([torch.arange(6).view(2, 3).t()]).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one"),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.float16)], "one dtype"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], "one dtype and device"),
    ],
)
def test_what_cannot_be_flat_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        apex_C.flatten(parts)


@pytest.mark.parametrize("flat", [torch.zeros(6), torch.zeros(8), torch.zeros(1, 7)])
def test_flat_tensor_of_another_size_is_refused(flat):
    with pytest.raises(ValueError, match="1-d tensor with the same number"):
        apex_C.unflatten(flat, tensors())
