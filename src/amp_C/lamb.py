"""LAMB steps, in one call or in two stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, store_copies
from amp_C.steps import decay_mode
from apex._core.foreach import lamb as rules
from apex._core.foreach.adam import AdamRule, directions_
from apex._core.foreach.gate import Gate, as_scalar, as_tensor
from apex._core.foreach.working import store, working

__all__ = [
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
]


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Takes one step in place; ignores the flag, so that inf and NaN pass through, as in apex.

    ``tensor_lists`` are ``[grads, params, exp_avgs, exp_avg_sqs]``. Unlike in apex, the gradients
    stay unchanged. They are clipped from ``global_grad_norm``, one element, to ``max_grad_norm``.
    With ``use_nvlamb``, tensors without weight decay get a trust ratio, too.
    """
    lists = checked("multi_tensor_lamb", noop_flag, tensor_lists, 4)
    options = (lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging)
    divisor = _divisor(noop_flag, global_grad_norm, max_grad_norm)
    _lamb(noop_flag, lists, options, step, divisor, use_nvlamb, Gate())


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float | Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: float | Tensor,
) -> None:
    """Takes one step on scaled gradients; does nothing if the flag is set.

    Arguments are those of :func:`multi_tensor_lamb`, numbers also as tensors of one element, except

    - ``noop_flag``, one int32 element, is read on the device; ``found_inf`` is ignored, as in apex,
    - ``tensor_lists`` may have the parameters' 16-bit copies as a fifth list, to be updated,
    - ``global_grad_norm`` and ``max_grad_norm`` are norms of the scaled gradients.
    """
    del found_inf
    *lists, copies = [*checked("multi_tensor_lamb_mp", noop_flag, tensor_lists, 4, 5), []][:5]
    options = (lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging)
    divisor = _divisor(noop_flag, global_grad_norm, max_grad_norm)
    divisor = divisor / as_scalar(inv_scale, noop_flag.device)
    gate = Gate.of(noop_flag, noop_flag.device)
    _lamb(noop_flag, lists, options, step, divisor, use_nvlamb, gate)
    if copies:
        store_copies(copies, lists[1], gate)


def _lamb(
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    options: tuple[Any, ...],
    step: int | Tensor,
    divisor: Tensor,
    use_nvlamb: bool | None,
    gate: Gate,
) -> None:
    lr, beta1, beta2, epsilon, decay, mode, correction, averaging = options
    rate, decoupled = as_scalar(lr, noop_flag.device), decay_mode(mode)
    flags = bool(correction), bool(averaging)
    rule = AdamRule(rate, beta1, beta2, epsilon, decay, decoupled, *flags)
    grads, params, firsts, seconds = lists
    rules.lamb_(
        params,
        grads,
        firsts,
        seconds,
        rule=rule,
        step=as_scalar(step, noop_flag.device),
        divisor=divisor,
        adaptive=bool(use_nvlamb) or decay != 0.0,
        gate=gate,
    )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: float | Tensor,
    max_global_grad_norm: float,
) -> None:
    """Updates the averages and writes the update that the second stage applies; ignores the flag.

    ``tensor_lists`` are ``[grads, params, exp_avgs, exp_avg_sqs, updates]``, ``per_tensor_decay``
    is each tensor's decoupled weight decay, ``[N]``, and ``step`` the number of previous steps.
    """
    name = "multi_tensor_lamb_stage1_cuda"
    grads, params, firsts, seconds, updates = checked(name, noop_flag, tensor_lists, 5)
    decays = _one_each(name, "per_tensor_decay", per_tensor_decay, params)
    if not params:
        return
    rule = AdamRule(1.0, beta1, beta2, epsilon, weight_decay=0.0, decoupled=True)
    weights, gradients, averages, squares = working(params, grads, firsts, seconds)
    divisor = _divisor(noop_flag, global_grad_norm, max_global_grad_norm)
    directions = directions_(
        weights,
        list(torch._foreach_div(gradients, divisor)),
        averages,
        squares,
        rule=rule,
        step=step + 1,
        gate=Gate(),
    )
    torch._foreach_add_(directions, torch._foreach_mul(weights, list(decays.unbind())))
    for targets, values in ((firsts, averages), (seconds, squares), (updates, directions)):
        store(targets, values)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float | Tensor,
    weight_decay: float | None = None,
    use_nvlamb: bool | None = False,
) -> None:
    """Subtracts each update from its parameter, with a separate rate per tensor; ignores the flag.

    ``tensor_lists`` are ``[params, updates]``, whose norms are ``[N]`` each. ``weight_decay=0``
    disables the trust ratio, unless ``use_nvlamb``. ``None`` enables it for all tensors, as in
    apex's first version, which lacked this argument.
    """
    name = "multi_tensor_lamb_stage2_cuda"
    params, updates = checked(name, noop_flag, tensor_lists, 2)
    param_norms = _one_each(name, "per_tensor_param_norm", per_tensor_param_norm, params)
    update_norms = _one_each(name, "per_tensor_update_norm", per_tensor_update_norm, params)
    if not params:
        return
    weights, directions = working(params, updates)
    if use_nvlamb or weight_decay != 0.0:
        ratios = rules.trust_ratios(param_norms, update_norms)
        directions = list(torch._foreach_mul(directions, list(ratios.unbind())))
    Gate().descend_(weights, directions, as_scalar(lr, noop_flag.device))
    store(params, weights)


def _divisor(
    noop_flag: Tensor, global_grad_norm: float | Tensor, max_grad_norm: float | Tensor
) -> Tensor:
    device = noop_flag.device
    norm = as_tensor(global_grad_norm, device)
    return rules.clip_divisor(norm, as_scalar(max_grad_norm, device))


def _one_each(name: str, argument: str, values: Tensor, params: list[Tensor]) -> Tensor:
    if values.numel() != len(params):
        raise ValueError(
            f"{name} got {values.numel()} values as {argument} for {len(params)} tensors; it "
            "takes one for each."
        )
    return values.reshape(-1).to(torch.float32)
