"""SGD, Adagrad and NovoGrad steps."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, store_copies
from apex._core.foreach.adagrad import AdagradRule, adagrad_
from apex._core.foreach.gate import Gate, as_scalar
from apex._core.foreach.novograd import NovoGradRule, blended, norms_of, novograd_
from apex._core.foreach.sgd import SGDRule, sgd_
from apex._core.foreach.working import working


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
    grads, params, momenta = lists[:3]
    if not params:
        return
    gate = Gate.of(noop_flag, noop_flag.device)
    rule = SGDRule(
        lr=as_scalar(lr, noop_flag.device),
        momentum=momentum,
        dampening=dampening,
        weight_decay=wd,
        nesterov=bool(nesterov),
        decay_after_momentum=bool(wd_after_momentum),
    )
    if scale != 1.0:
        (wide,) = working(grads)
        grads = list(torch._foreach_mul(wide, scale))
    sgd_(params, grads, momenta, rule=rule, first_run=bool(first_run), gate=gate)
    if len(lists) == 4:
        store_copies(lists[3], params, gate)


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
    rule = AdagradRule(as_scalar(lr, noop_flag.device), epsilon, weight_decay, decoupled=mode == 1)
    adagrad_(params, grads, sums, rule=rule, gate=Gate())


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
    if norm_type not in (0, 2):
        raise ValueError(
            f"multi_tensor_novograd got norm_type={norm_type!r}; it must be 2 (2-norm) or "
            "0 (largest absolute value)."
        )
    if grad_norms.numel() != len(params):
        raise ValueError(
            f"multi_tensor_novograd got {grad_norms.numel()} running norms for {len(params)} "
            "gradients; it takes one for each."
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
