"""One loss's scale, static or dynamic, on the device of the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from apex._core.finite import unscale_, unscale_and_check_
from apex._core.policy import LossScale
from apex._core.scale import ScaleRule, checked_static, update_scale_
from apex._torch import dtensor
from apex._torch.copies import HostCopy, as_tensor, capturing, has_values, moved

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import OverflowFlag

INITIAL_SCALE = 2.0**16

T = TypeVar("T")
Reading = tuple[T, tuple[float, ...]]
"""What the values belong to, and the values."""


class ScaleUpdate(NamedTuple):
    """One update of a loss scale, as read on the host.

    Attributes:
        loss_id: Index of the session's scaler.
        loss_scale: The scale after the update (multiplier).
        overflow: Whether a gradient of this pass held inf or NaN.
        optimizers: Number of optimizers of the pass.
        skipped_in_row: Consecutive overflows, including this one; 0 when clean.
    """

    loss_id: int
    loss_scale: float
    overflow: bool
    optimizers: int
    skipped_in_row: int


class PassEnd(NamedTuple):
    """The end of one ``scale_loss`` block, as known on the host.

    Attributes:
        loss_id: Index of the session's scaler.
        updates: Scale updates that have arrived by now; on a device, those of earlier passes.
        prepared_optimizers: The optimizers of the pass.
        failed: Whether an exception ended it.
    """

    loss_id: int
    updates: Sequence[ScaleUpdate]
    prepared_optimizers: Sequence[object]
    failed: bool


class Readback(Generic[T]):
    """A queue of small tensors being copied to the host.

    ``send`` starts a copy and returns at once; ``poll`` returns completed ones, oldest first. A
    tensor in host memory completes at once.
    """

    def __init__(self) -> None:
        self._ready: list[Reading[T]] = []
        self._in_flight: deque[tuple[T, HostCopy]] = deque()

    def send(self, source: T, values: Tensor) -> None:
        """Queues the present values of a 1-d tensor, with what they belong to.

        Nothing is queued while a CUDA graph is captured, as a replay has no host side, nor for
        fake tensors, which have no values.
        """
        self.prepare(source, values)()

    def prepare(self, source: T, values: Tensor) -> Callable[[], None]:
        """Returns a function that does what ``send`` does, and allocates its memory now."""
        if capturing(values.device) or not has_values(values):
            return lambda: None
        if values.device.type == "cpu" and not self._in_flight:
            # On the host, tolist() reads memory in place: no kernel, no wait.
            return lambda: self._ready.append((source, tuple(values.tolist())))
        copy = HostCopy(values)
        return lambda: self._in_flight.append((source, copy.start()))

    def poll(self, *, wait: bool = False) -> list[Reading[T]]:
        """Returns readings completed since the last call, oldest first; with ``wait``, all."""
        while self._in_flight and (wait or self._in_flight[0][1].arrived):
            source, copy = self._in_flight.popleft()
            self._ready.append((source, tuple(copy.wait().tolist())))
        arrived = self._ready
        self._ready = []
        return arrived


class Scaler(ABC):
    """The scale of one loss.

    Scale, overflow flag and count of clean steps move to the device of each loss that is scaled;
    they start on the CPU.

    Attributes:
        dynamic: Whether the scale reacts to overflows.
        is_identity: Whether the scale is exactly 1 and gradients are not checked.
        loss_scale: The scale, 0-d fp32 (multiplier).
        found_inf: Whether the present pass overflowed, 0-d fp32.
        rule: The rule of a dynamic scale; changes by :meth:`set_rule`.
        loss_id: Index of the loss in its session.
        unchecked: Flags of the optimizers of passes from which the scale is not updated yet, as
            the keys of a dict. The next pass adds to ``found_inf``. They are raised when a block
            updates the scale, and not when a script does.
        version: Changes with the scale.
        own_update: What a script put in place of a dynamic scale's update: reads and sets flag,
            scale and count itself, and returns whether to skip the step. ``None`` without one.
    """

    dynamic: ClassVar[bool]
    is_identity = False
    loss_scale: Tensor
    found_inf: Tensor

    def __init__(self, first: float, rule: ScaleRule, loss_id: int) -> None:
        """Starts at ``first`` (multiplier), on the CPU."""
        self._bind(torch.tensor([first, 0.0], dtype=torch.float32, device="cpu"))
        self.rule = rule
        self.loss_id = loss_id
        self.unchecked: dict[OverflowFlag, None] = {}
        self.version = 0
        self.own_update: Callable[[], object] | None = None

    # -- one backward pass -------------------------------------------------------------------

    def scale(self, loss: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns the loss times the scale, in fp32 (fp64 of an fp64 loss), and that scale.

        The scale is a number, or if dynamic a 0-d tensor that updates do not change.
        """
        if self.loss_scale.device != loss.device and loss.device.type != "meta":
            self.move_to(loss.device)
        factor = self.factor()
        if loss.dtype not in (torch.float32, torch.float64):
            loss = loss.float()
        # A loss that a script gave a backward of its own, around this pass, would call that again.
        if self.is_identity and "backward" not in vars(loss):
            return loss, factor
        return loss * factor, factor

    @abstractmethod
    def factor(self) -> Tensor | float:
        """Returns the present scale without a host sync: a number, or a 0-d copy if dynamic."""

    def begin_pass(self) -> None:
        """Clears the flag of a dynamic scale, unless the scale is not updated from it yet."""
        if self.dynamic and not self.unchecked:
            self.found_inf.zero_()

    @abstractmethod
    def unscale_(self, values: list[Tensor], scale: Tensor | float) -> None:
        """Divides gradients by a scale, in place; a dynamic scale also checks them.

        Args:
            values: Dense gradients, see :func:`apex._core.finite.dense_values`.
            scale: What :meth:`factor` returned for the pass, or another number.
        """

    def share_overflow(self, params: Sequence[Tensor]) -> None:
        """Raises the flag if any rank that holds shards of ``params`` has raised its own.

        Every rank of a sharded model must call it in every pass, so that all step or skip together
        and keep equal scales.
        """
        if over := dtensor.groups(params):
            dtensor.all_reduce_(self.found_inf, over, "MAX")

    def end_pass(self, optimizers: int) -> None:
        """Ends a block that updates the scale, and raises the flags of its optimizers."""
        unchecked = self.unchecked  # first, because the script's own update clears it
        own_update = self.own_update
        if own_update is not None:
            self.found_inf.fill_(float(bool(own_update())))
        for flag in unchecked:
            flag.add(self.found_inf)
        self.update(optimizers, is_done=own_update is not None)

    @abstractmethod
    def update(self, optimizers: int, *, is_done: bool = False) -> None:
        """Updates a dynamic scale from its flag, or counts a static one's step.

        Args:
            optimizers: Number of optimizers of the pass, for the report.
            is_done: Whether ``own_update`` has updated a dynamic scale already.
        """

    def read_updates(self) -> list[ScaleUpdate]:
        """Returns the updates that have reached the host since the last call, oldest first."""
        return []

    # -- state -------------------------------------------------------------------------------

    @abstractmethod
    def read_scale(self) -> float:
        """Returns the scale as a number. Syncs with the device if it is dynamic."""

    @abstractmethod
    def read_growth_tracker(self) -> int:
        """Returns the clean steps since the scale last changed; of a static one, all steps.

        Syncs if it is dynamic.
        """

    def read_found_inf(self) -> bool:
        """Returns whether the last pass overflowed. Syncs with the device."""
        return bool(self.found_inf)  # sync: the caller asks for a host number

    @abstractmethod
    def set_scale(self, loss_scale: float) -> None:
        """Sets the scale.

        Raises:
            ValueError: If it is not positive and finite.
        """

    @abstractmethod
    def set_growth_tracker(self, growth_tracker: int) -> None:
        """Sets the count of clean steps; a dynamic scale's stays below the interval."""

    def set_rule(self, rule: ScaleRule) -> None:
        """Sets the rule without a host sync.

        A count of clean steps at or past the new interval is set just below it, so that the next
        clean step grows the scale.
        """
        self.rule = rule

    def move_to(self, device: torch.device) -> None:
        """Moves scale and flag to ``device``."""
        self._bind(moved(self._scale_and_flag, device))

    def _bind(self, values: Tensor) -> None:
        # One tensor holds scale and flag, so that one copy brings both to the host.
        self._scale_and_flag = values
        self.loss_scale, self.found_inf = values[0], values[1]


class StaticScaler(Scaler):
    """A constant scale, applied as a Python number; gradients are not checked."""

    dynamic = False

    def __init__(self, loss_scale: float, rule: ScaleRule, *, loss_id: int = 0) -> None:
        """Sets the scale.

        Raises:
            ValueError: If it is not positive and finite.
        """
        self._take(loss_scale)
        super().__init__(self._scale, rule, loss_id)
        self._growth_tracker = 0

    def _take(self, loss_scale: float) -> None:
        self._scale = checked_static(loss_scale)  # exact; fp32 may round it
        self.is_identity = self._scale == 1.0

    def factor(self) -> float:
        return self._scale

    def unscale_(self, values: list[Tensor], scale: Tensor | float) -> None:
        """Divides gradients in place, unchecked."""
        if values and scale != 1.0:
            unscale_(values, 1.0 / float(scale))  # sync: none, it is a number

    def update(self, optimizers: int, *, is_done: bool = False) -> None:
        """Counts a step."""
        self._growth_tracker += 1

    def read_scale(self) -> float:
        return self._scale

    def read_growth_tracker(self) -> int:
        return self._growth_tracker

    def set_scale(self, loss_scale: float) -> None:
        self._take(loss_scale)
        self.version += 1
        self.loss_scale.fill_(self._scale)

    def set_growth_tracker(self, growth_tracker: int) -> None:
        self._growth_tracker = growth_tracker


class DynamicScaler(Scaler):
    """A scale that backs off on overflow and grows after clean steps, all on the device.

    Attributes:
        growth_tracker: Clean steps since the scale last changed, 0-d int32.
    """

    dynamic = True

    def __init__(
        self, rule: ScaleRule, *, loss_id: int = 0, initial: float = INITIAL_SCALE
    ) -> None:
        """Starts at ``initial``, clamped to the rule's bounds.

        Raises:
            ValueError: If ``initial`` is not positive and finite.
        """
        first = min(max(checked_static(initial), rule.least), rule.greatest)
        super().__init__(first, rule, loss_id)
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device="cpu")
        self._readback: Readback[int] = Readback()
        self._skipped_in_row = 0

    def set_rule(self, rule: ScaleRule) -> None:
        super().set_rule(rule)
        self.growth_tracker.clamp_(max=rule.growth_interval - 1)

    def factor(self) -> Tensor:
        return self.loss_scale.clone()

    def unscale_(self, values: list[Tensor], scale: Tensor | float) -> None:
        """Divides gradients in place, and raises the flag on inf or NaN."""
        if values:
            divisor = as_tensor(scale, self.found_inf.device)
            # With ``out`` it is no op that casts inside a region.
            inverse = torch.reciprocal(divisor, out=torch.empty_like(divisor))
            unscale_and_check_(values, inverse, self.found_inf)

    def update(self, optimizers: int, *, is_done: bool = False) -> None:
        """Updates the scale from the flag, on the device, and sends both to the host."""
        # First, because memory may run out.
        send = self._readback.prepare(optimizers, self._scale_and_flag)
        if not is_done:
            update_scale_(self.loss_scale, self.growth_tracker, self.found_inf, self.rule)
        self.unchecked = {}
        self.version += 1
        send()

    def read_updates(self) -> list[ScaleUpdate]:
        """Returns the updates that have reached the host since the last call, oldest first."""
        updates = []
        for optimizers, (loss_scale, found_inf) in self._readback.poll():
            overflow = found_inf != 0.0
            self._skipped_in_row = self._skipped_in_row + 1 if overflow else 0
            updates.append(
                ScaleUpdate(self.loss_id, loss_scale, overflow, optimizers, self._skipped_in_row)
            )
        return updates

    def read_scale(self) -> float:
        return float(self.loss_scale)  # sync: the caller asks for a host number

    def read_growth_tracker(self) -> int:
        return int(self.growth_tracker)  # sync: the caller asks for a host number

    def set_scale(self, loss_scale: float) -> None:
        """Sets the scale, which may exceed the rule's bounds until the next update."""
        self.loss_scale.fill_(checked_static(loss_scale))
        self.version += 1

    def set_growth_tracker(self, growth_tracker: int) -> None:
        self.growth_tracker.fill_(min(growth_tracker, self.rule.growth_interval - 1))

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self.growth_tracker = moved(self.growth_tracker, device)


def scaler_for(
    loss_scale: LossScale,
    rule: ScaleRule,
    *,
    loss_id: int = 0,
    initial: float = INITIAL_SCALE,
) -> Scaler:
    """Returns the scaler for ``loss_scale``, a number or ``"dynamic"``.

    A dynamic scale starts at ``initial`` (multiplier), within the rule's bounds.

    Raises:
        ValueError: If the scale is not positive and finite.
    """
    if loss_scale == "dynamic":
        return DynamicScaler(rule, loss_id=loss_id, initial=initial)
    return StaticScaler(loss_scale, rule, loss_id=loss_id)
