"""Loss scales kept on the host, for hand-written training loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core import finite
from apex._core.scale import ScaleRule, ScaleState, next_scale
from apex.fp16_utils.fp16util import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class LossScaler:
    """A static loss scale.

    Attributes:
        cur_scale: The scale (multiplier).
    """

    def __init__(self, scale: float = 1) -> None:
        """Takes the scale."""
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The scale (multiplier)."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns False: a static scale checks nothing."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing: the scale is static."""

    def scale_gradient(
        self, module: object, grad_in: Sequence[Tensor], grad_out: object
    ) -> tuple[Tensor, ...]:
        """Returns ``grad_in`` times the scale: a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """A loss scale that falls on overflow and grows after ``scale_window`` clean steps.

    Never below 1. The script asks ``has_overflow``, skips the step if so, and calls
    ``update_scale``.

    Attributes:
        cur_scale: The scale (multiplier).
        cur_iter: Updates so far.
        last_overflow_iter: Number of the last update with an overflow; -1 for none.
        scale_factor: Growth factor; its inverse is the backoff factor.
        scale_window: Clean steps before growth.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        """Takes the first scale and how it moves.

        Raises:
            ValueError: If ``scale_factor`` is not above 1, or ``scale_window`` below 1.
        """
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self._rule()

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns whether the gradient of any parameter holds inf or NaN. Waits for the device."""
        grads = [param.grad for param in params if param.grad is not None]
        return any_not_finite(grads)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return any_not_finite([x])

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale after one backward pass."""
        clean_steps = (self.cur_iter - self.last_overflow_iter - 1) % self.scale_window
        state = ScaleState(float(self.cur_scale), clean_steps)
        self.cur_scale = next_scale(state, self._rule(), overflow=overflow).scale
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def _rule(self) -> ScaleRule:
        return ScaleRule(self.scale_factor, 1.0 / self.scale_factor, self.scale_window, floor=1.0)


def any_not_finite(grads: Sequence[Tensor]) -> bool:
    """Returns whether any tensor holds inf or NaN; changes none. Waits for the device once."""
    dense = finite.dense_values([g.coalesce() if g.is_sparse else g for g in grads])
    values = [value for value in dense if value.numel() > 0]
    if not values:
        return False
    flags: list[Any] = []
    for group in finite.group(values):
        # The largest magnitude is inf or NaN exactly where some element is.
        flags += [norm.isfinite() for norm in torch._foreach_norm(group, float("inf"))]
    first = flags[0].device
    together = torch.stack([flag.to(first) for flag in flags])
    return not bool(together.all())  # sync: the caller asks for a host value
