"""A loss scale in Python numbers, for training loops that decide on the host whether to step."""

from __future__ import annotations

from dataclasses import dataclass

from apex._core.scale import ScaleRule, ScaleState, checked_static, next_scale


@dataclass(eq=False)
class HostScale:
    """A static or dynamic loss scale, updated by :func:`apex._core.scale.next_scale`.

    Attributes may be set at any time, as old scripts do.

    Attributes:
        cur_scale: The scale (multiplier).
        scale_factor: Growth factor; its inverse is the backoff factor.
        scale_window: Clean steps before growth.
        dynamic: Whether the scale reacts to overflows.
        min_loss_scale: Smallest dynamic scale; ``None`` for the smallest normal fp32.
        max_loss_scale: Largest dynamic scale; ``None`` for the largest fp32.
        cur_iter: Updates so far.
        last_overflow_iter: Index of the last update with an overflow; -1 for none.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If the rule's are not numbers.
    """

    cur_scale: float
    scale_factor: float = 2.0
    scale_window: int = 1000
    # Objects unpickled from apex's checkpoints lack these three and have the defaults of the class.
    dynamic: bool = True
    min_loss_scale: float | None = 1.0
    max_loss_scale: float | None = None
    cur_iter: int = 0
    last_overflow_iter: int = -1

    def __post_init__(self) -> None:
        self.cur_scale = checked_static(self.cur_scale)
        self.rule()

    def rule(self) -> ScaleRule:
        """Returns the rule of a dynamic scale.

        Raises:
            ValueError: If an attribute is out of range.
        """
        bounds = {"min_scale": self.min_loss_scale, "max_scale": self.max_loss_scale}
        return ScaleRule.symmetric(self.scale_factor, self.scale_window, **bounds)

    @property
    def growth_tracker(self) -> int:
        """Steps without overflow since the scale last changed."""
        steps = self.cur_iter - self.last_overflow_iter - 1
        return steps % self.rule().growth_interval if self.dynamic else steps

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale after one backward pass."""
        if self.dynamic:
            state = ScaleState(float(self.cur_scale), self.growth_tracker)
            self.cur_scale = next_scale(state, self.rule(), overflow=overflow).scale
            if overflow:
                self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1
