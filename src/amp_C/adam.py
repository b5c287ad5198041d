"""Adam and AdamW steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, store_copies
from apex._core.foreach.adam import AdamRule, adam_
from apex._core.foreach.gate import Gate, as_scalar
from apex._core.foreach.working import store, working


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
    rule = adam_rule(noop_flag, lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
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
    """
    lists = checked("multi_tensor_adam_capturable", noop_flag, tensor_lists, 4)
    options = (lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _unscale_and_step(noop_flag, lists, step, inv_scale, *options)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
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
    """Runs :func:`multi_tensor_adam_capturable` on masters and writes the rounded result to params.

    ``tensor_lists`` are ``[grads, params, exp_avgs, exp_avg_sqs, masters]``.
    """
    lists = checked("multi_tensor_adam_capturable_master", noop_flag, tensor_lists, 5)
    options = (lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _unscale_and_step(noop_flag, lists, step, inv_scale, *options)


def _unscale_and_step(
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    step: int | Tensor,
    inv_scale: float | Tensor,
    *options: Any,
) -> None:
    grads, params, firsts, seconds, *masters = lists
    if not params:
        return
    gate, (wide,) = Gate.of(noop_flag, noop_flag.device), working(grads)
    rule = adam_rule(noop_flag, *options)
    factor = gate.coefficient(as_scalar(inv_scale, grads[0].device), 1.0)
    unscaled = list(torch._foreach_mul(wide, factor))
    (targets,) = masters or [params]
    count = as_scalar(step, noop_flag.device)
    adam_(targets, unscaled, firsts, seconds, rule=rule, step=count, gate=gate)
    store(grads, unscaled)
    if masters:
        store_copies(params, targets, gate)


def adam_rule(
    noop_flag: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    *,
    averaged: bool = True,
) -> AdamRule:
    """Returns the hyperparameters of Adam or LAMB, given as to their functions."""
    if mode not in (0, 1):
        raise ValueError(
            f"mode is {mode!r}; it must be 0 (weight decay in the gradient) or 1 (decoupled)."
        )
    return AdamRule(
        lr=as_scalar(lr, noop_flag.device),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        averaged=averaged,
    )
