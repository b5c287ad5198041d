"""Loss scales kept on the host, for hand-written training loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex._core import arguments
from apex._core.foreach.norms import any_non_finite
from apex._core.scale import ScaleRule, ScaleState, checked_static, next_scale
from apex._torch.dtensor import dense_values, summed_values
from apex.fp16_utils.fp16util import to_python_float as to_python_float


def _are_non_finite(*tensors: Tensor) -> bool:
    """Returns whether any of the tensors holds inf or NaN."""
    values = dense_values([summed_values(tensor) for tensor in tensors])
    if not values:
        return False
    return bool(any_non_finite(values, values[0].device))  # sync: the caller asks for a host value


def scaled(loss: Tensor, scale: float, *, dynamic: bool) -> Tensor:
    """Returns a loss times its scale: a tensor, by which traces recognize a dynamic scale."""
    if dynamic:
        return loss * torch.full((), scale, dtype=torch.float32, device=loss.device)
    return loss * scale


class LossScaler:
    """A static loss scale.

    Attributes:
        cur_scale: The scale (multiplier).
        dynamic: Whether the scale reacts to overflows.
    """

    dynamic = False

    def __init__(self, scale: float = 1) -> None:
        """Sets the scale.

        Raises:
            ValueError: If it is not a positive, finite number.
        """
        self.cur_scale = checked_static(scale, "scale")

    @property
    def loss_scale(self) -> float:
        """The scale (multiplier)."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns False: gradients are not checked at a static scale."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing: the scale is static."""

    def scale_gradient(
        self, module: object, grad_in: Sequence[Tensor], grad_out: object
    ) -> tuple[Tensor, ...]:
        """Returns ``grad_in`` times the scale; for use as a module's backward hook."""
        return tuple(self.cur_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the scale."""
        arguments.loss("LossScaler.backward", loss)
        scaled_loss = scaled(loss, self.cur_scale, dynamic=self.dynamic)
        scaled_loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off on overflow and grows after ``scale_window`` clean steps.

    It never falls below 1. The script calls ``has_overflow``, skips the step if it returns True,
    and calls ``update_scale``.

    Attributes:
        cur_scale: The scale (multiplier).
        cur_iter: Updates so far.
        last_overflow_iter: Number of the last update with an overflow; -1 for none.
        scale_factor: Growth factor; its inverse is the backoff factor.
        scale_window: Clean steps before growth.
        min_loss_scale: Smallest dynamic scale; ``None`` for the smallest normal fp32.
        max_loss_scale: Largest dynamic scale; ``None`` for the largest fp32.
    """

    # Objects unpickled from apex's checkpoints lack these three.
    dynamic = True
    min_loss_scale: float | None = 1.0
    max_loss_scale: float | None = None

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        """Sets the initial scale and the rule.

        Raises:
            ValueError: If ``scale_factor`` is not above 1, or ``scale_window`` is below 1.
        """
        super().__init__(init_scale)
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.rule()

    def rule(self) -> ScaleRule:
        """Returns the rule of a dynamic scale.

        Raises:
            ValueError: If an attribute is out of range.
            TypeError: If one is not a number.
        """
        return ScaleRule.symmetric(
            self.scale_factor,
            self.scale_window,
            min_scale=self.min_loss_scale,
            max_scale=self.max_loss_scale,
        )

    @property
    def growth_tracker(self) -> int:
        """Steps without overflow since the scale last changed."""
        steps = self.cur_iter - self.last_overflow_iter - 1
        return steps % self.rule().growth_interval

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale after one backward pass."""
        if self.dynamic:
            state = ScaleState(float(self.cur_scale), self.growth_tracker)
            self.cur_scale = next_scale(state, self.rule(), overflow=overflow).scale
            if overflow:
                self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns whether the gradient of any parameter holds inf or NaN; synchronizes."""
        return _are_non_finite(*(param.grad for param in params if param.grad is not None))

    _has_inf_or_nan = staticmethod(_are_non_finite)
