"""``clip_grad_norm_``: clipping of everything that a prepared optimizer steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from apex._core import arguments
from apex._core.param_groups import params_of
from apex._engine.optimizer import clipping
from apex._engine.optimizer.optimizer_class import binding_of
from apex.amp.handle import session_of
from apex.amp.optimizers import unwrap


def clip_grad_norm_(
    optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales the gradients of an optimizer so that their global norm is at most ``max_norm``.

    Call it between the ``scale_loss`` block and ``step()``. The norm is that of the unscaled
    gradients of all parameters that the optimizer steps, over all ranks of sharded ones, and is
    computed in fp32. Equals ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), ...)``,
    but leaves the gradients of large models at O2 and O5 in 16 bits if the optimizer is a fused
    one, and updates the gradients of the model, too. No host sync.

    Args:
        optimizer: An optimizer, or ``LARC`` around one.
        max_norm: Largest allowed norm.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN; requires a host sync.

    Returns:
        The norm before clipping, 0-d, fp32 (fp64 for fp64 gradients); 0 without gradients.

    Raises:
        RuntimeError: If amp has not prepared the optimizer; if the gradients are still scaled; if
            ``error_if_nonfinite`` is set and the norm is not finite.
        TypeError: If a gradient is sparse, ``optimizer`` is not an optimizer, or a norm no number.
        ValueError: If ``max_norm`` or ``norm_type`` is negative or NaN.

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
    binding = binding_of(own)
    if session_of([own], [binding], caller="amp.clip_grad_norm_") is None or binding is None:
        return nn.utils.clip_grad_norm_(params_of(own), max_norm, norm_type, error_if_nonfinite)
    return clipping.clip_grad_norm_(
        binding, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )
