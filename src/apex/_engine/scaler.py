"""One loss's scale: a 0-d tensor on the device of the loss, moved there without a host sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from apex._core.finite import unscale_, unscale_and_check_
from apex._core.policy import LossScale
from apex._core.scale import ScaleRule, checked_static, update_scale_
from apex._engine.events import ScaleUpdate
from apex._engine.readback import Arrivals
from apex._torch import dtensor

INITIAL_SCALE = 2.0**16


class Scaler:
    """The scale of one loss, dynamic or static.

    The scale, the count of clean steps and the overflow flag of the present pass live on the
    device of the first loss that is scaled (until then on the CPU) and are read on the host only
    when somebody asks.

    Attributes:
        open_blocks: The ``scale_loss`` blocks that are open now: their scaled losses may still
            be used.
        patient: Whether ``arrived`` waits for the device, so that a report still finds the
            gradients that it speaks of.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        rule: ScaleRule,
        *,
        loss_id: int = 0,
        initial: float = INITIAL_SCALE,
    ) -> None:
        """Starts a dynamic scale at ``initial`` within the rule's bounds, or a static one.

        Raises:
            ValueError: If a static scale is not positive and finite.
        """
        self.dynamic = loss_scale == "dynamic"
        self.rule = rule
        self.loss_id = loss_id
        if loss_scale == "dynamic":
            initial = min(max(initial, rule.least), rule.greatest)
        else:
            initial = checked_static(loss_scale)
        # Only the dynamic scale is on the device: a static one takes no kernel to apply or count.
        self._static = initial
        self._static_steps = 0
        self._place(torch.device("cpu"), initial, 0)
        self._arrivals = Arrivals()
        self._passes_sent: list[int] = []
        self._skipped_in_row = 0
        self._updated = True
        self._held = False
        self.open_blocks: set[object] = set()
        self.patient = False

    # -- one backward pass -------------------------------------------------------------------

    @property
    def is_identity(self) -> bool:
        """Whether scaling by it changes nothing: static and exactly 1."""
        return not self.dynamic and self._static == 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss in fp32, times the scale; for a static 1 just in fp32."""
        if self._values.device != loss.device and loss.device.type != "meta":
            self.move_to(loss.device)
        loss = loss.float() if loss.dtype is not torch.float64 else loss
        if not self.dynamic:
            return loss if self._static == 1.0 else loss * self._static
        return loss * self.loss_scale

    def factor(self) -> Tensor | float:
        """Returns what losses are multiplied by, without waiting: 0-d where it is dynamic."""
        return self.loss_scale if self.dynamic else self._static

    def begin_pass(self, *, continues: bool = False) -> None:
        """Clears the overflow flag of the last pass, before gradients are unscaled.

        After a pass whose update was left out the flag stays up: it has not moved the scale yet.

        Args:
            continues: Whether gradients of a held pass are still there to be sent.
        """
        if self.dynamic and (self._updated or (self._held and not continues)):
            self.found_inf.zero_()
        self._updated = self._held = False

    @property
    def pass_state(self) -> tuple[bool, bool]:
        """What :meth:`begin_pass` goes by; set back where a pass failed."""
        return self._updated, self._held

    @pass_state.setter
    def pass_state(self, state: tuple[bool, bool]) -> None:
        self._updated, self._held = state

    def hold(self) -> None:
        """Ends a pass whose gradients stay in this process; the scale moves when they are sent."""
        self._held = True

    def renew(self) -> None:
        """Goes on with copies of scale and flag, and leaves the present ones as they are.

        For autograd graphs that are still to be used: they hold the scale that they were made
        with, and refuse to run when it has moved in place.
        """
        if self.dynamic:
            self._bind(self._values.clone(), self.clean_steps)

    def unscale_(
        self,
        values: list[Tensor],
        *,
        override: float | None = None,
        scaled_by: Tensor | None = None,
    ) -> None:
        """Divides gradients by the scale in place; a dynamic scale also checks them.

        Args:
            values: Dense gradients, see :func:`apex._core.finite.dense_values`.
            override: Divide by this instead of the scale.
            scaled_by: The dynamic scale (0-d) of the pass; ``None`` means the present one.
        """
        if not values:
            return
        if self.dynamic:
            inverse = self._inverse(override) if scaled_by is None else scaled_by.reciprocal()
            unscale_and_check_(values, inverse, self.found_inf)
        elif (override or self._static) != 1.0:
            unscale_(values, 1.0 / (override or self._static))

    def share_overflow(self, params: Sequence[Tensor]) -> None:
        """Raises the flag where a rank that holds other parts of ``params`` has raised its own.

        Every rank of a sharded model has to call it in every pass: they step or skip together, and
        their scales stay equal.
        """
        if over := dtensor.groups(params):
            dtensor.greatest_(self.found_inf, over)

    def update(self, optimizers: int) -> None:
        """Ends the pass: moves a dynamic scale by its flag, and counts a clean step.

        Args:
            optimizers: How many optimizers the pass was for, for the report.
        """
        if self.dynamic:
            update_scale_(self.loss_scale, self.clean_steps, self.found_inf, self.rule)
            self._updated = True
            if self._arrivals.send(self._values):
                self._passes_sent.append(optimizers)
        else:
            self._static_steps += 1

    def arrived(self) -> list[ScaleUpdate]:
        """Returns the updates that have reached the host since the last call, oldest first."""
        updates = []
        for loss_scale, found_inf in self._arrivals.poll(wait=self.patient):
            overflow = found_inf != 0.0
            self._skipped_in_row = self._skipped_in_row + 1 if overflow else 0
            optimizers = self._passes_sent.pop(0)
            updates.append(
                ScaleUpdate(self.loss_id, loss_scale, overflow, optimizers, self._skipped_in_row)
            )
        return updates

    def _inverse(self, override: float | None) -> Tensor:
        if override is not None:
            return torch.full_like(self.loss_scale, 1.0 / override)
        return self.loss_scale.reciprocal()

    # -- state -------------------------------------------------------------------------------

    def read_scale(self) -> float:
        """Returns the scale as a number. Waits for the device where it is dynamic."""
        if not self.dynamic:
            return self._static  # to the last bit, which fp32 need not hold
        return float(self.loss_scale)  # sync: the caller asks for a host number

    def read_clean_steps(self) -> int:
        """Returns the clean steps since the scale last changed. Waits for the device."""
        if not self.dynamic:
            return self._static_steps
        return int(self.clean_steps)  # sync: the caller asks for a host number

    def read_found_inf(self) -> bool:
        """Returns whether the last pass overflowed. Waits for the device."""
        return bool(self.found_inf)  # sync: the caller asks for a host number

    def set_scale(self, loss_scale: float) -> None:
        """Sets the scale.

        Raises:
            ValueError: If it is not positive and finite.
        """
        self._static = checked_static(float(loss_scale))
        self.loss_scale.fill_(self._static)

    def set_clean_steps(self, clean_steps: int) -> None:
        """Sets the count of clean steps since the scale last changed."""
        self._static_steps = clean_steps
        self.clean_steps.fill_(clean_steps)

    def state(self) -> Mapping[str, float | int]:
        """Returns ``{"loss_scale": float, "unskipped": int}``, apex's checkpoint of one scaler."""
        return {"loss_scale": self.read_scale(), "unskipped": self.read_clean_steps()}

    def move_to(self, device: torch.device) -> None:
        """Moves scale, count and flag to ``device``, with their values."""
        values, clean_steps = self._values, self.clean_steps
        self._bind(values.to(device, non_blocking=True), clean_steps.to(device, non_blocking=True))

    def _place(self, device: torch.device, loss_scale: float, clean_steps: int) -> None:
        self._bind(
            torch.tensor([loss_scale, 0.0], dtype=torch.float32, device=device),
            torch.tensor(clean_steps, dtype=torch.int32, device=device),
        )

    def _bind(self, values: Tensor, clean_steps: Tensor) -> None:
        # One tensor holds scale and flag, so that one copy brings both to the host.
        self._values = values
        self.loss_scale = values[0]
        self.found_inf = values[1]
        self.clean_steps = clean_steps
