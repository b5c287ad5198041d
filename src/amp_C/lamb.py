"""LAMB steps, in one call or in two stages."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, takes
from amp_C.steps import adam_rule
from apex._optimizer_rules import lamb as rules
from apex._optimizer_rules.adam import AdamRule
from apex._optimizer_rules.scalars import Scalar, descend_, descend_each_, skip_flag
from apex._optimizer_rules.working import store, working
from apex._torch.copies import as_scalar, as_tensor

__all__ = [
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
]


@takes(4)
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
    With ``use_nvlamb``, tensors without weight decay also get a trust ratio.
    """
    rule = adam_rule(
        noop_flag, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging
    )
    divisor = _divisor(noop_flag, global_grad_norm, max_grad_norm)
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    rules.lamb_(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        rule,
        step,
        divisor=divisor,
        nvlamb=bool(use_nvlamb),
    )


@takes(4, 5)
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

    Takes the arguments of :func:`multi_tensor_lamb`. Numbers may also be tensors of one element.
    Differences:

    - ``noop_flag``, one int32 element, is read on the device. As in apex, ``found_inf`` is ignored.
    - ``tensor_lists`` may have a fifth list, the parameters' 16-bit copies, which are also updated.
    - ``global_grad_norm`` and ``max_grad_norm`` are norms of the scaled gradients.
    """
    device = noop_flag.device
    skip = skip_flag(noop_flag, device)
    count = as_scalar(step, device)
    rule = adam_rule(
        noop_flag, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging
    )
    divisor = _divisor(noop_flag, global_grad_norm, max_grad_norm) / as_scalar(inv_scale, device)
    grads, params, exp_avgs, exp_avg_sqs, *copies = tensor_lists
    rules.lamb_(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        rule,
        count,
        skip,
        divisor=divisor,
        nvlamb=bool(use_nvlamb),
    )
    for low_precision in copies:
        store(low_precision, params, skip)


@takes(5)
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
    rule = AdamRule(1.0, (beta1, beta2), epsilon, weight_decay=0.0, decoupled=True)
    divisor = _divisor(noop_flag, global_grad_norm, max_global_grad_norm)
    decays = per_tensor_decay.reshape(-1).float().unbind()
    with working(*tensor_lists) as (grads, params, exp_avgs, exp_avg_sqs, updates):
        clipped = torch._foreach_div(grads, divisor)
        directions = rules.directions(
            clipped, params, exp_avgs, exp_avg_sqs, rule=rule, step=step + 1
        )
        torch._foreach_addcmul_(directions, params, decays)
        store(updates, directions)


@takes(2)
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
    params, updates = tensor_lists
    rate = as_scalar(lr, noop_flag.device)
    with working(updates, params) as (directions, weights):
        if use_nvlamb or weight_decay != 0.0:
            param_norms = per_tensor_param_norm.reshape(-1).float()
            update_norms = per_tensor_update_norm.reshape(-1).float()
            ratios = rules.trust_ratios(param_norms, update_norms)
            descend_each_(weights, directions, rate * ratios)
        else:
            descend_(weights, directions, rate)


def _divisor(noop_flag: Tensor, norm: Scalar, max_norm: Scalar) -> Tensor:
    device = noop_flag.device
    total = as_tensor(norm, device)
    return rules.clip_divisor(total, as_scalar(max_norm, device))
