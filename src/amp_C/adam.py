"""Adam and AdamW steps."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked
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

    Args:
        chunk_size: Ignored.
        noop_flag: Ignored.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``.
        lr: Learning rate.
        beta1: Decay of the average of gradients.
        beta2: Decay of the average of their squares.
        epsilon: Term added to the denominator.
        step: Number of this step, counted from 1.
        mode: 0 for weight decay in the gradient (Adam), 1 for decoupled decay (AdamW).
        bias_correction: Whether to correct the bias of the averages: 1 or 0.
        weight_decay: Decay rate.
    """
    del chunk_size
    grads, params, firsts, seconds = checked("multi_tensor_adam", noop_flag, tensor_lists, 4)
    rule = _rule(noop_flag, lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
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

    Args:
        chunk_size: Ignored.
        noop_flag: One int32 element; read on the device.
        tensor_lists: ``[grads, params, exp_avgs, exp_avg_sqs]``.
        lr: Learning rate; a tensor stays on the device.
        beta1: Decay of the average of gradients.
        beta2: Decay of the average of their squares.
        epsilon: Term added to the denominator.
        step: Number of this step, counted from 1, one element.
        mode: 0 for weight decay in the gradient (Adam), 1 for decoupled decay (AdamW).
        bias_correction: Whether to correct the bias of the averages: 1 or 0.
        weight_decay: Decay rate.
        inv_scale: Multiplier on the gradients, one element.
    """
    del chunk_size
    name = "multi_tensor_adam_capturable"
    grads, params, firsts, seconds = checked(name, noop_flag, tensor_lists, 4)
    if not params:
        return
    gate = Gate.of(noop_flag, noop_flag.device)
    rule = _rule(noop_flag, lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    unscaled = _unscaled(grads, inv_scale, gate)
    count = as_scalar(step, noop_flag.device)
    adam_(params, unscaled, firsts, seconds, rule=rule, step=count, gate=gate)
    store(grads, unscaled)


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
    del chunk_size
    name = "multi_tensor_adam_capturable_master"
    grads, params, firsts, seconds, masters = checked(name, noop_flag, tensor_lists, 5)
    if not params:
        return
    gate = Gate.of(noop_flag, noop_flag.device)
    rule = _rule(noop_flag, lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    unscaled = _unscaled(grads, inv_scale, gate)
    count = as_scalar(step, noop_flag.device)
    adam_(masters, unscaled, firsts, seconds, rule=rule, step=count, gate=gate)
    store(grads, unscaled)
    rounded = [master.to(param.dtype) for master, param in zip(masters, params, strict=True)]
    store(params, gate.select(params, rounded))


def _rule(
    noop_flag: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> AdamRule:
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
    )


def _unscaled(grads: list[Tensor], inv_scale: float | Tensor, gate: Gate) -> list[Tensor]:
    (wide,) = working(grads)
    factor = gate.coefficient(as_scalar(inv_scale, grads[0].device), 1.0)
    return list(torch._foreach_mul(wide, factor))
