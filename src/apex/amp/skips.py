"""``step_was_skipped``: whether an overflow skipped the last step, without a host sync."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from apex._engine.optimizer.optimizer_class import binding_of
from apex.amp.optimizers import unwrap


@overload
def step_was_skipped(optimizer: Any, *, on_host: Literal[False] = False) -> Tensor: ...


@overload
def step_was_skipped(optimizer: Any, *, on_host: Literal[True]) -> bool | None: ...


def step_was_skipped(optimizer: Any, *, on_host: bool = False) -> Tensor | bool | None:
    """Returns whether an overflow skipped the optimizer's last ``step()``; never waits.

    The answer holds until the next ``step()``. It is False before the first step, with static loss
    scales (which skip nothing), and for an optimizer that amp has not prepared or that is disabled.

    Args:
        optimizer: An optimizer, or ``LARC`` around one.
        on_host: Whether to return a Python bool instead of a tensor, and None until the answer has
            arrived from the device. On a CPU, and with optimizers that amp skips on the host (all
            but fused ones), it is there at once.

    Returns:
        A 0-d bool tensor on the device of the loss scale. ``bool()`` of it waits for the device;
        ``torch.where(skipped, ...)`` does not.

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
    binding = binding_of(unwrap(optimizer))
    if binding is None:
        return False if on_host else torch.tensor(False)
    if on_host:
        return binding.skipped_on_host()
    skipped, flag = binding.skipped, binding.found_inf
    if isinstance(skipped, Tensor):
        return skipped != 0
    return torch.full((), skipped, device=None if flag is None else flag.device)
