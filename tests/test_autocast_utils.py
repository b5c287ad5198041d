"""``apex._autocast_utils``, whose one function fused layers of other projects import."""

import pytest
import torch

from apex._autocast_utils import (
    _cast_if_autocast_enabled,
    _get_autocast_dtypes,
    _get_current_dtype,
)


def test_without_autocast_arguments_come_back_as_they_are():
    x, shape = torch.ones(2, 3), torch.Size([3])
    found = _cast_if_autocast_enabled(x, None, shape, 1e-5)
    assert found[0] is x
    assert found[1:] == (None, shape, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_its_device_s_floating_point_tensors_have_its_dtype(dtype):
    double, index = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    meta = torch.ones(2, device="meta")
    with torch.autocast("cpu", dtype=dtype):
        x, nested, *kept = _cast_if_autocast_enabled(
            torch.ones(2, 3), [torch.ones(1)], double, index, meta, torch.Size([3])
        )
    assert x.dtype is nested[0].dtype is dtype
    assert all(a is b for a, b in zip(kept, (double, index, meta), strict=False))
    assert type(kept[-1]) is torch.Size


def test_gradients_pass_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (low,) = _cast_if_autocast_enabled(x)
    low.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_an_rms_norm_of_another_project_casts_as_the_fused_one():
    """InternEvo's: the function of apex's mixed norm, which casts by itself."""
    from apex.normalization.fused_layer_norm import mixed_dtype_fused_rms_norm_affine

    x, weight = torch.randn(4, 8), torch.ones(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mixed_dtype_fused_rms_norm_affine(x, weight, (8,), 1e-5)
        args = _cast_if_autocast_enabled(x, weight, (8,), 1e-5)
        with torch.autocast("cpu", enabled=False):
            expected = mixed_dtype_fused_rms_norm_affine(*args)
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_dtypes_of_autocast_on_cuda():
    assert _get_current_dtype() is _get_current_dtype(torch.float16) is torch.float32
    assert set(_get_autocast_dtypes()) <= {torch.float16, torch.bfloat16}
