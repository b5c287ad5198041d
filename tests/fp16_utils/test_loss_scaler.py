"""Loss scales for hand-written loops."""

import pytest
import torch

from apex.fp16_utils import DynamicLossScaler, LossScaler


def param(*grad):
    result = torch.nn.Parameter(torch.zeros(len(grad)))
    result.grad = torch.tensor(grad)
    return result


def by_the_rule(overflows, scale, factor, window):
    """apex's rule, said plainly: what the scale is after each update."""
    scales, last = [], -1
    for i, overflow in enumerate(overflows):
        if overflow:
            scale, last = max(scale / factor, 1.0), i
        elif (i - last) % window == 0:
            scale = scale * factor
        scales.append(scale)
    return scales


@pytest.mark.parametrize("factor", [2.0, 4.0])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_dynamic_scale_follows_the_rule(window, factor):
    overflows = [False, False, True, False, False, False, False, True, True, *[False] * 6]
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=factor, scale_window=window)
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == by_the_rule(overflows, 8.0, factor, window)


def test_dynamic_scale_never_falls_below_1():
    scaler = DynamicLossScaler(init_scale=1.5)
    for _ in range(3):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0


def test_dynamic_scale_starts_at_2_to_the_32():
    assert DynamicLossScaler().loss_scale == 2**32


def test_static_scale_stays_and_sees_no_overflow():
    scaler = LossScaler(8.0)
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    assert not scaler.has_overflow([param(float("inf"))])


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_overflow_is_seen_in_any_place_and_dtype(value, dtype):
    bad = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    bad.grad = torch.tensor([1.0, value], dtype=dtype)
    assert DynamicLossScaler().has_overflow(iter([param(1.0), bad]))


def test_large_finite_gradients_are_no_overflow():
    bad = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    bad.grad = torch.full((4,), 65504.0, dtype=torch.float16)  # their sum is beyond fp16
    assert not DynamicLossScaler().has_overflow([bad])


def test_large_finite_fp64_gradients_are_no_overflow():
    big = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    big.grad = torch.full((1,), 1e300, dtype=torch.float64)
    assert not DynamicLossScaler().has_overflow([big])


def test_a_scaler_that_apex_pickled_goes_on():
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    state = {"cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": 1}
    scaler.__dict__.update(**state, scale_factor=2.0, scale_window=2)
    scaler.update_scale(False)
    assert scaler.loss_scale == 16.0
    scaler.update_scale(True)
    assert (scaler.loss_scale, scaler.last_overflow_iter) == (8.0, 4)


def test_overflow_is_seen_in_sparse_gradients():
    bad = torch.nn.Parameter(torch.zeros(3, 1))
    bad.grad = torch.sparse_coo_tensor([[0, 0]], [[3e38], [3e38]], (3, 1), check_invariants=True)
    assert DynamicLossScaler().has_overflow([bad])


def test_nothing_to_check_is_no_overflow():
    empty = torch.nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    assert not DynamicLossScaler().has_overflow([torch.nn.Parameter(torch.zeros(1)), empty])


def test_checking_changes_no_gradient():
    good = param(1.0, 2.0)
    DynamicLossScaler().has_overflow([good])
    assert good.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(init_scale=4.0)])
def test_backward_scales_the_loss(scaler):
    weight = torch.nn.Parameter(torch.ones(1))
    scaler.backward((3.0 * weight).sum())
    assert weight.grad.item() == 12.0


@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(init_scale=4.0)])
def test_backward_can_retain_the_graph(scaler):
    weight = torch.nn.Parameter(torch.ones(1))
    loss = weight.square().sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad.item() == 16.0


def test_scale_gradient_scales_what_a_backward_hook_gets():
    (scaled,) = LossScaler(4.0).scale_gradient(None, (torch.ones(1),), None)
    assert scaled.item() == 4.0


@pytest.mark.parametrize("options", [{"scale_factor": 1.0}, {"scale_window": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="it must be"):
        DynamicLossScaler(**options)


@pytest.mark.parametrize("scale", ["x", None, 0, -1.0, float("nan")])
@pytest.mark.parametrize("scaler", [LossScaler, DynamicLossScaler])
def test_what_is_no_scale_is_refused(scaler, scale):
    with pytest.raises(ValueError, match=r"scale is .*; it must be a positive, finite number"):
        scaler(scale)


@pytest.mark.parametrize("loss", [None, "loss", 1.0, torch.tensor(1)])
def test_what_is_no_loss_is_refused(loss):
    with pytest.raises(TypeError, match="got a loss of"):
        LossScaler(8.0).backward(loss)
