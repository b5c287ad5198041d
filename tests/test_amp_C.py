"""The multi-tensor functions: names, arguments, lists, and what callers do with them."""

import inspect
import math

import pytest
import torch

import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
from tests.multi_tensor_apply.lists import (
    BF16,
    FP32,
    assert_same,
    clones,
    flag,
    tensors,
)
from tests.optimizers import cases

STEPS = {
    "multi_tensor_scale": (2, (1.0,)),
    "multi_tensor_axpby": (3, (1.0, 1.0, -1)),
    "multi_tensor_l2norm": (1, (True,)),
    "multi_tensor_l2norm_mp": (1, (True,)),
    "multi_tensor_l2norm_scale": (2, (1.0, True)),
    "multi_tensor_unscale_l2norm": (1, (1.0, True)),
    "multi_tensor_sgd": (3, (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)),
    "multi_tensor_adam": (4, (0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)),
    "multi_tensor_adam_capturable": (4, (0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0, 1.0)),
    "multi_tensor_adam_capturable_master": (5, (0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0, 1.0)),
    "multi_tensor_adagrad": (3, (0.1, 1e-8, 0, 0.0)),
    "multi_tensor_novograd": (
        3, (torch.zeros(0), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, 2)),
    "multi_tensor_lamb": (
        4, (0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, torch.ones(1), 1.0, False)),
    "multi_tensor_lamb_mp": (4, (
        0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, torch.ones(1), 1.0, False, torch.zeros(1), 1.0)),
    "multi_tensor_lamb_stage1_cuda": (
        5, (torch.zeros(0), 0, 0.9, 0.9, 1e-8, torch.ones(1), 1.0)),
    "multi_tensor_lamb_stage2_cuda": (2, (torch.zeros(0), torch.zeros(0), 0.1, 0.0, False)),
}  # fmt: skip
every = pytest.mark.parametrize("name", STEPS)


def test_every_function_is_here():
    assert sorted([*STEPS, "update_scale_hysteresis"]) == sorted(amp_C.__all__)


@every
def test_empty_lists_do_nothing(name):
    count, args = STEPS[name]
    overflow = flag()
    result = getattr(amp_C, name)(65536, overflow, [[] for _ in range(count)], *args)
    assert overflow.item() == 0
    if "l2norm" in name:
        assert (result[0].tolist(), result[1].tolist()) == ([0.0], [])


@every
def test_another_number_of_lists_is_refused(name):
    count, args = STEPS[name]
    with pytest.raises(ValueError, match=rf"{name} got {count + 2} tensor lists"):
        getattr(amp_C, name)(65536, flag(), [tensors(FP32)] * (count + 2), *args)


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        ([[torch.ones(2)], []], ValueError, "equally long"),
        ([[torch.ones(2)], [torch.ones(3)]], ValueError, "same number of elements"),
        ([[torch.ones(2, 3)], [torch.ones(2, 3).t()]], ValueError, "must be contiguous"),
        ([[torch.ones(2)], [None]], TypeError, "NoneType"),
        ([[torch.ones(2)], [torch.ones(2, dtype=torch.int64)]], TypeError, "int64"),
        ([[torch.ones(2)], [torch.ones(2).to_sparse()]], TypeError, "dense"),
        ([[torch.ones(2)], [torch.ones(2, device="meta")]], ValueError, "meta"),
    ],
)
def test_lists_that_do_not_fit_are_refused_before_anything_changes(lists, error, message):
    overflow = flag()
    before = clones(lists[0])
    with pytest.raises(error, match=message):
        amp_C.multi_tensor_scale(65536, overflow, lists, 2.0)
    assert_same(lists[0], before)
    assert overflow.item() == 0


@pytest.mark.parametrize(
    ("noop_flag", "error"), [(0, TypeError), (torch.zeros(2, dtype=torch.int32), ValueError)]
)
def test_flag_must_be_one_element(noop_flag, error):
    with pytest.raises(error, match="overflow flag"):
        amp_C.multi_tensor_scale(65536, noop_flag, [tensors(FP32)] * 2, 2.0)


def test_shapes_may_differ_where_sizes_agree():
    target = torch.zeros(6)
    amp_C.multi_tensor_scale(65536, flag(), [[torch.ones(2, 3)], [target]], 2.0)
    assert torch.equal(target, torch.full((6,), 2.0))


def test_parameters_that_require_gradients_are_stepped():
    params = cases.parameters()
    before = [p.detach().clone() for p in params]
    lists = [cases.gradients(params, 0), params, *([torch.zeros_like(p) for p in params],) * 2]
    amp_C.multi_tensor_adam(65536, flag(), lists, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))


@pytest.mark.parametrize("mode", [2, -1])
def test_unknown_mode_of_adam_is_refused(mode):
    lists = [tensors(FP32) for _ in range(4)]
    with pytest.raises(ValueError, match=f"mode is {mode}"):
        amp_C.multi_tensor_adam(65536, flag(), lists, 0.1, 0.9, 0.9, 1e-8, 1, mode, 1, 0.0)


def test_running_norms_must_be_one_for_each_gradient():
    lists = [tensors(FP32) for _ in range(3)]
    args = (torch.zeros(1), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, 2)
    with pytest.raises(ValueError, match="1 running norms for 4 gradients"):
        amp_C.multi_tensor_novograd(65536, flag(), lists, *args)


ARGUMENTS = {
    "multi_tensor_scale": "scale",
    "multi_tensor_axpby": "a b arg_to_check",
    "multi_tensor_l2norm": "per_tensor",
    "multi_tensor_l2norm_mp": "per_tensor",
    "multi_tensor_l2norm_scale": "scale per_tensor",
    "multi_tensor_unscale_l2norm": "inv_scale per_tensor",
    "multi_tensor_sgd": "wd momentum dampening lr nesterov first_run wd_after_momentum scale",
    "multi_tensor_adam": "lr beta1 beta2 epsilon step mode bias_correction weight_decay",
    "multi_tensor_adam_capturable": "lr beta1 beta2 epsilon step mode bias_correction "
    "weight_decay inv_scale",
    "multi_tensor_adam_capturable_master": "lr beta1 beta2 epsilon step mode bias_correction "
    "weight_decay inv_scale",
    "multi_tensor_adagrad": "lr epsilon mode weight_decay",
    "multi_tensor_novograd": "grad_norms lr beta1 beta2 epsilon step bias_correction "
    "weight_decay grad_averaging mode norm_type",
    "multi_tensor_lamb": "lr beta1 beta2 epsilon step bias_correction weight_decay "
    "grad_averaging mode global_grad_norm max_grad_norm use_nvlamb",
    "multi_tensor_lamb_mp": "lr beta1 beta2 epsilon step bias_correction weight_decay "
    "grad_averaging mode global_grad_norm max_grad_norm use_nvlamb found_inf inv_scale",
    "multi_tensor_lamb_stage1_cuda": "per_tensor_decay step beta1 beta2 epsilon "
    "global_grad_norm max_global_grad_norm",
    "multi_tensor_lamb_stage2_cuda": "per_tensor_param_norm per_tensor_update_norm lr "
    "weight_decay use_nvlamb",
}


@every
def test_arguments_are_apexs_in_their_order(name):
    found = list(inspect.signature(getattr(amp_C, name)).parameters)
    assert found == ["chunk_size", "noop_flag", "tensor_lists", *ARGUMENTS[name].split()]


def test_the_gradient_clipper_of_bert():
    grads = [torch.full((4,), 3.0), torch.full((2, 2), 4.0)]
    overflow = flag()
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [grads], False)
    assert norm.item() == 10.0
    clip = 1.0 / (norm.item() + 1e-6)
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, grads], clip)
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [grads], False)
    assert math.isclose(norm.item(), 1.0, rel_tol=1e-5)
    assert overflow.item() == 0


def test_an_average_of_weights_with_axpby():
    average, weights = tensors(FP32), tensors(BF16, seed=1)
    expected = [0.9 * a + (1 - 0.9) * w.float() for a, w in zip(average, weights, strict=True)]
    lists = [average, weights, average]
    amp_C.multi_tensor_axpby(65536, flag(), lists, 0.9, 1 - 0.9, -1)
    assert_same(average, expected, rtol=1e-6, atol=1e-7)
