"""Optimizer steps other than LAMB's."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, store_copies
from apex._core.foreach.adagrad import adagrad_
from apex._core.foreach.adam import AdamRule, adam_
from apex._core.foreach.gate import Gate, as_scalar
from apex._core.foreach.novograd import NovoGradRule, blended, norms_of, novograd_
from apex._core.foreach.sgd import SGDRule, sgd_
from apex._core.foreach.working import store, working

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_novograd",
    "multi_tensor_sgd",
]


@torch.no_grad()
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
    grads, params, firsts, seconds = checked("multi_tensor_adam", noop_flag, tensor_lists, 4)
    rate, decoupled = as_scalar(lr, noop_flag.device), decay_mode(mode)
    rule = AdamRule(rate, beta1, beta2, epsilon, weight_decay, decoupled, bool(bias_correction))
    adam_(params, grads, firsts, seconds, rule=rule, step=step, gate=Gate())


@torch.no_grad()
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

    ``inv_scale`` multiplies the gradients; ``lr`` and ``step`` may be on the device, too.
    ``tensor_lists`` are ``[grads, params, exp_avgs, exp_avg_sqs]``, to which the function with
    ``master`` adds the params' masters: it steps these, and writes the rounded result to params.
    """
    lists = checked("multi_tensor_adam_capturable", noop_flag, tensor_lists, 4, 5)
    grads, params, firsts, seconds, *masters = lists
    if not params:
        return
    device, (targets,) = noop_flag.device, masters or [params]
    gate, (wide,) = Gate.of(noop_flag, device), working(grads)
    rate, decoupled = as_scalar(lr, device), decay_mode(mode)
    rule = AdamRule(rate, beta1, beta2, epsilon, weight_decay, decoupled, bool(bias_correction))
    factor = gate.coefficient(as_scalar(inv_scale, device), 1.0)
    unscaled = list(torch._foreach_mul(wide, factor))
    adam_(targets, unscaled, firsts, seconds, rule=rule, step=as_scalar(step, device), gate=gate)
    store(grads, unscaled)
    if masters:
        store_copies(params, targets, gate)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
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

    ``tensor_lists`` are ``[grads, params, momenta]``, or with the parameters' 16-bit copies as a
    fourth list, which are updated, too. ``first_run`` initializes the momentum with the gradient,
    ``wd_after_momentum`` adds weight decay after the momentum, and ``scale``, the reciprocal of the
    loss scale, multiplies the gradients.
    """
    lists = checked("multi_tensor_sgd", noop_flag, tensor_lists, 3, 4)
    grads, params, momenta, *copies = lists
    if not params:
        return
    gate, rate = Gate.of(noop_flag, noop_flag.device), as_scalar(lr, noop_flag.device)
    rule = SGDRule(rate, momentum, dampening, wd, bool(nesterov), bool(wd_after_momentum))
    if scale != 1.0:
        (wide,) = working(grads)
        grads = list(torch._foreach_mul(wide, scale))
    sgd_(params, grads, momenta, rule=rule, first_run=bool(first_run), gate=gate)
    if copies:
        store_copies(copies[0], params, gate)


@torch.no_grad()
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
    grads, params, sums = checked("multi_tensor_adagrad", noop_flag, tensor_lists, 3)
    adagrad_(
        params,
        grads,
        sums,
        lr=as_scalar(lr, noop_flag.device),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=decay_mode(mode),
        gate=Gate(),
    )


@torch.no_grad()
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
    grads, params, averages = checked("multi_tensor_novograd", noop_flag, tensor_lists, 3)
    if norm_type not in (0, 2) or grad_norms.numel() != len(params):
        raise ValueError(
            f"multi_tensor_novograd got norm_type={norm_type!r} and {grad_norms.numel()} running "
            f"norms for {len(params)} gradients; it takes 2 (2-norm) or 0 (largest absolute "
            "value), and one norm for each."
        )
    rule = NovoGradRule(
        lr=as_scalar(lr, noop_flag.device),
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        weight_decay=weight_decay,
        bias_correction=bool(bias_correction),
        averaged=bool(grad_averaging),
        inside_moment=mode == 0,
        norm_type=norm_type,
    )
    norms = blended(grad_norms, norms_of(grads, norm_type, noop_flag.device), rule)
    grad_norms.copy_(norms)
    novograd_(params, grads, averages, norms, rule=rule, step=step, gate=Gate())


def decay_mode(mode: int) -> bool:
    """Returns whether weight decay is decoupled: 0 for decay in the gradient, 1 for decoupled."""
    if mode not in (0, 1):
        raise ValueError(
            f"mode is {mode!r}; it must be 0 (weight decay in the gradient) or 1 (decoupled)."
        )
    return mode == 1
