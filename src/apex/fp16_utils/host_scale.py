"""The loss scale of one ``FP16_Optimizer``: numbers on the host, in apex's names."""

from __future__ import annotations

from typing import Any

from apex._core.scale import ScaleRule, ScaleState, checked_static, next_scale


class HostScale:
    """A static or dynamic loss scale.

    Attributes:
        dynamic: Whether it follows the gradients.
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        """Takes a static scale, or how a dynamic one moves.

        Args:
            loss_scale: A static scale; ``None`` for a dynamic one.
            init_scale: First value of a dynamic scale (multiplier).
            scale_factor: Growth factor; its inverse is the backoff factor.
            scale_window: Clean steps before growth.
            min_loss_scale: Least dynamic scale.
            max_loss_scale: Greatest dynamic scale.

        Raises:
            ValueError: If a number is out of its range.
        """
        self.dynamic = loss_scale is None
        self._rule = ScaleRule(
            scale_factor, 1.0 / scale_factor, scale_window, min_loss_scale, max_loss_scale
        )
        if loss_scale is None:
            first = min(max(init_scale, self._rule.least), self._rule.greatest)
        else:
            first = checked_static(float(loss_scale))
        self._state = ScaleState(first, 0)

    def loss_scale(self) -> float:
        """Returns the present scale (multiplier)."""
        return self._state.scale

    @property
    def at_floor(self) -> bool:
        """Whether a dynamic scale can fall no further."""
        return self._state.scale <= self._rule.least

    @property
    def _loss_scale(self) -> float:
        return self._state.scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._state = self._state._replace(scale=checked_static(float(value)))

    @property
    def _unskipped(self) -> int:
        return self._state.clean_steps

    def update(self, *, overflow: bool) -> None:
        """Moves a dynamic scale after one backward pass."""
        if self.dynamic:
            self._state = next_scale(self._state, self._rule, overflow=overflow)
        else:
            self._state = self._state._replace(clean_steps=self._state.clean_steps + 1)

    def state(self) -> dict[str, Any]:
        """Returns plain numbers, which every ``torch.load`` reads."""
        return {
            "dynamic": self.dynamic,
            "_loss_scale": self._state.scale,
            "_unskipped": self._state.clean_steps,
        }

    def load(self, saved: Any) -> None:
        """Takes back what ``state`` gave, or apex's own pickled scaler.

        Raises:
            ValueError: If it is neither; nothing is changed then.
        """
        values = saved if isinstance(saved, dict) else getattr(saved, "__dict__", {})
        # apex's scaler of `apex.amp`, and the older ones of `apex.fp16_utils`.
        scale = values.get("_loss_scale", values.get("cur_scale"))
        if scale is None:
            raise ValueError(
                f"The state's loss_scaler is {saved!r}; it must be what "
                "FP16_Optimizer.state_dict() gave, or a loss scaler of apex."
            )
        steps = values.get("_unskipped")
        if steps is None:
            passed = values.get("cur_iter", 0) - values.get("last_overflow_iter", -1) - 1
            steps = passed % self._rule.growth_interval
        self._state = ScaleState(checked_static(float(scale)), int(steps))
