"""Clipping by apex's name is torch's clipping, with fp32 norms."""

import pytest
import torch

from apex.contrib.clip_grad import clip_grad_norm_
from tests.optimizers import cases


def with_gradients(dtype=torch.float32):
    params = cases.parameters(dtype)
    cases.give(params, cases.gradients(params, 0))
    return params


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2, 3.0, float("inf"), "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_it_is_torchs(norm_type, max_norm, dtype):
    ours, theirs = with_gradients(dtype), with_gradients(dtype)
    found = clip_grad_norm_(ours, max_norm, norm_type=norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
    torch.testing.assert_close(found, expected)
    cases.assert_same([p.grad for p in ours], [p.grad for p in theirs])


def test_norm_of_fp64_gradients_is_fp64():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.grad = torch.full((4,), 1e100, dtype=torch.float64)
    assert clip_grad_norm_([param], 2.0) == 2e100
    assert param.grad.tolist() == [1.0] * 4


def test_norm_of_fp16_gradients_does_not_overflow():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 4e4, dtype=torch.float16)
    norm = clip_grad_norm_([param], 2.0)
    torch.testing.assert_close(norm, torch.tensor(8e4), rtol=1e-3, atol=0)
    torch.testing.assert_close(param.grad, torch.ones_like(param.grad), rtol=1e-2, atol=0)


def test_several_dtypes_share_one_norm():
    params = with_gradients() + with_gradients(torch.bfloat16)
    expected = torch.stack([p.grad.double().square().sum() for p in params]).sum().sqrt()
    norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, expected.float(), rtol=1e-5, atol=0)
    after = torch.stack([p.grad.double().square().sum() for p in params]).sum().sqrt()
    torch.testing.assert_close(after.float(), torch.tensor(1.0), rtol=1e-2, atol=0)


def test_one_tensor_and_a_generator_are_taken():
    params = with_gradients()
    whole = clip_grad_norm_(params[0], 1e9)
    assert whole == clip_grad_norm_((p for p in params[:1]), 1e9)


def test_without_gradients_the_norm_is_0():
    assert clip_grad_norm_(cases.parameters(), 1.0) == 0.0


def test_error_if_nonfinite_raises_and_changes_nothing():
    params = with_gradients()
    params[0].grad[0, 0] = float("inf")
    before = [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    cases.assert_same([p.grad for p in params], before, rtol=0, atol=0)


def test_clipping_reads_nothing_on_the_host():
    params = with_gradients()
    with cases.HostReads() as reads:
        clip_grad_norm_(params, 1.0)
    assert reads.count == 0


@pytest.mark.parametrize(
    ("error", "value"), [(ValueError, -1.0), (TypeError, "x"), (TypeError, None)]
)
def test_a_norm_that_would_reverse_the_gradients_is_refused(error, value):
    params = with_gradients()
    before = [p.grad.clone() for p in params]
    with pytest.raises(error, match=f"clip_grad_norm_ got max_norm={value!r}; it must be"):
        clip_grad_norm_(params, value)
    cases.assert_same([p.grad for p in params], before, rtol=0, atol=0)


def test_sparse_gradients_are_refused():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        clip_grad_norm_([param], 1.0)


def test_a_model_in_place_of_its_parameters_is_refused():
    with pytest.raises(TypeError, match=r"got the model Linear; .*Pass model\.parameters\(\)"):
        clip_grad_norm_(torch.nn.Linear(2, 2), 1.0)
