"""``clip_grad_norm_`` and ``step_was_skipped``: before and after a step, without a host sync."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from apex._core import arguments
from apex._core.param_groups import params_of
from apex._engine import clipping
from apex._engine.optimizer.subclass import prepared_state
from apex._engine.scaler import OverflowFlag
from apex._torch.copies import as_tensor
from apex.amp.handle import session_of
from apex.amp.optimizers import unwrap


def clip_grad_norm_(
    optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales the gradients of an optimizer so that their global norm is at most ``max_norm``.

    Call it between the ``scale_loss`` block and ``step()``. The norm covers the unscaled
    gradients of all parameters of the optimizer, across all ranks if they are sharded, and is
    computed in fp32. Equals ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), ...)``,
    but leaves the gradients of a model at O5 in 16 bits. No host sync.

    Args:
        optimizer: An optimizer, or ``LARC`` around one.
        max_norm: Largest allowed norm.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN; requires a host sync.

    Returns:
        The norm before clipping, 0-d, fp32 (fp64 for fp64 gradients); 0 without gradients.

    Raises:
        RuntimeError: If amp has not prepared the optimizer; if the gradients are still scaled or
            incomplete; if ``error_if_nonfinite`` is set and the norm is not finite.
        TypeError: If a gradient is sparse, ``optimizer`` is not an optimizer, or a norm no number.
        ValueError: If ``max_norm`` or ``norm_type`` is negative, NaN, or a string without a number.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        >>> loss = model(torch.tensor([[3.0, 4.0]])).sum()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> amp.clip_grad_norm_(optimizer, max_norm=1.0)
        tensor(5.)
        >>> optimizer.step()
    """
    own = unwrap(optimizer)
    max_norm, norm_type = arguments.clipping("amp.clip_grad_norm_", max_norm, norm_type)
    prepared = prepared_state(own)
    if session_of([prepared], caller="amp.clip_grad_norm_") is None or prepared is None:
        return nn.utils.clip_grad_norm_(params_of(own), max_norm, norm_type, error_if_nonfinite)
    return clipping.clip_grad_norm_(
        prepared, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )


def step_was_skipped(optimizer: Any, *, on_host: bool = False) -> Any:
    """Returns whether an overflow skipped the optimizer's last ``step()``; never waits.

    The answer is valid until the next ``step()``. It is False before the first step, and with a
    static loss scale, which skips nothing. It is also False for an optimizer that amp has not
    prepared, or that is disabled.

    Args:
        optimizer: An optimizer, or ``LARC`` around one.
        on_host: Whether to return a Python bool instead of a tensor, or None while the value is
            still being copied from the device. On a CPU, and for optimizers without a fused kernel,
            which amp skips on the host, the bool is available immediately.

    Returns:
        A 0-d bool tensor on the device of the loss scale. ``bool()`` of it synchronizes with
        the device. ``torch.where(skipped, ...)`` does not.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = model(torch.full((1, 2), float("inf"))).sum()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> amp.step_was_skipped(optimizer)
        tensor(True)
        >>> amp.step_was_skipped(optimizer, on_host=True)
        True
    """
    prepared = prepared_state(unwrap(optimizer))
    overflow = OverflowFlag() if prepared is None else prepared.overflow
    if on_host:
        return overflow.was_skipped_on_host()
    return as_tensor(overflow.was_skipped, overflow.device) != 0
