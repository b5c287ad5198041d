"""Optimizer steps other than LAMB's."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, takes
from apex._core.dtypes import math_dtype
from apex._optimizer_rules.adagrad import adagrad_
from apex._optimizer_rules.adam import AdamRule, adam_
from apex._optimizer_rules.novograd import novograd_
from apex._optimizer_rules.scalars import skip_flag
from apex._optimizer_rules.sgd import SGDRule, sgd_
from apex._optimizer_rules.working import scale_, store
from apex._torch.copies import as_scalar, as_tensor

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_novograd",
    "multi_tensor_sgd",
]


@takes(4)
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Takes one step in place; ignores the flag, so that inf and NaN pass through, as in apex.

    ``tensor_lists`` are ``[grads, params, exp_avgs, exp_avg_sqs]``.
    """
    rule = adam_rule(noop_flag, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction)
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    adam_(grads, params, exp_avgs, exp_avg_sqs, rule, step)


@takes(4, 5)
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: float | Tensor,
) -> None:
    """Unscales the gradients in place and takes one step; does nothing if the flag is set.

    ``inv_scale`` multiplies the gradients; ``lr`` and ``step`` may also be on the device.
    ``tensor_lists`` are ``[grads, params, exp_avgs, exp_avg_sqs]``, to which the function with
    ``master`` adds the params' masters: it steps these, and writes the rounded result to params.
    """
    device = noop_flag.device
    skip = skip_flag(noop_flag, device)
    grads, params, exp_avgs, exp_avg_sqs, *masters = tensor_lists
    stepped = masters[0] if masters else params
    rule = adam_rule(noop_flag, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction)
    unscaled = scale_(grads, as_tensor(inv_scale, device), skip)
    adam_(unscaled, stepped, exp_avgs, exp_avg_sqs, rule, as_scalar(step, device), skip)
    store(params, stepped, skip)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@takes(3, 4)
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float | Tensor,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """Takes one step in place; does nothing if the flag is set, which is read on the device.

    ``tensor_lists`` are ``[grads, params, momenta]``. A fourth list may hold the parameters' 16-bit
    copies, which are also updated. ``first_run`` initializes the momentum with the gradient.
    ``wd_after_momentum`` adds weight decay after the momentum. ``scale``, the reciprocal of the
    loss scale, multiplies the gradients.
    """
    grads, params, momenta, *copies = tensor_lists
    skip = skip_flag(noop_flag, noop_flag.device)
    rate = as_scalar(lr, noop_flag.device)
    rule = SGDRule(rate, momentum, dampening, wd, bool(nesterov), bool(wd_after_momentum))
    if scale != 1.0:
        grads = torch._foreach_mul([grad.to(math_dtype(grad)) for grad in grads], scale)
    buffers = momenta if momentum else []
    sgd_(grads, params, buffers, rule, skip, first_run=bool(first_run))
    for low_precision in copies:
        store(low_precision, params, skip)


@takes(3)
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float | Tensor,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Takes one step in place; ignores the flag, so that inf and NaN pass through, as in apex.

    ``tensor_lists`` are ``[grads, params, sums]``.
    """
    grads, params, sums = tensor_lists
    adagrad_(
        grads,
        params,
        sums,
        lr=as_scalar(lr, noop_flag.device),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
    )


@takes(3)
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Takes one step in place; ignores the flag, so that inf and NaN pass through, as in apex.

    ``tensor_lists`` are ``[grads, params, exp_avgs]``; ``grad_norms``, ``[N]`` fp32, the gradients'
    running norms, are updated. ``mode`` is 0 to normalize and decay gradients before averaging, 1
    after it; ``norm_type`` is 2 for the 2-norm, 0 for the largest absolute value.
    """
    rule = adam_rule(
        noop_flag, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging
    )
    grads, params, exp_avgs = tensor_lists
    novograd_(grads, params, exp_avgs, grad_norms, rule, step, norm_type=norm_type)


def adam_rule(
    noop_flag: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    mode: int,
    bias_correction: int,
    grad_averaging: int = 1,
) -> AdamRule:
    """Returns the rule of these arguments, which mean the same in every function."""
    return AdamRule(
        lr=as_scalar(lr, noop_flag.device),
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        averaged=bool(grad_averaging),
    )
