"""Loss scales kept on the host, for hand-written training loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from apex._core import arguments
from apex._core.finite import dense_values, summed_values
from apex._core.foreach.norms import any_non_finite
from apex._core.scale import checked_static
from apex.fp16_utils.fp16util import to_python_float
from apex.fp16_utils.host_scale import HostScale

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class LossScaler:
    """A static loss scale.

    Attributes:
        cur_scale: The scale (multiplier).
    """

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
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the scale."""
        arguments.loss("LossScaler.backward", loss)
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(HostScale, LossScaler):
    """A loss scale that falls on overflow and grows after ``scale_window`` clean steps.

    It never falls below 1. The script calls ``has_overflow``, skips the step if it returns True,
    and calls ``update_scale``.

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
        """Sets the initial scale and the rule.

        Raises:
            ValueError: If ``scale_factor`` is not above 1, or ``scale_window`` is below 1.
        """
        super().__init__(init_scale, scale_factor, scale_window)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns whether the gradient of any parameter holds inf or NaN. Waits for the device."""
        return _any_non_finite([param.grad for param in params if param.grad is not None])

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return _any_non_finite([x])


def _any_non_finite(tensors: list[Tensor]) -> bool:
    values = dense_values([summed_values(tensor) for tensor in tensors])
    if not values:
        return False
    return bool(any_non_finite(values, values[0].device))  # sync: the caller asks for a host value
