"""One loss's scale, static or dynamic, on the device of the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from apex._core.policy import LossScale
from apex._core.scale import ScaleRule, checked_static
from apex._torch import foreach
from apex._torch.copies import HostCopy, as_tensor, capturing, is_readable, moved
from apex._torch.dynamo import untraced

INITIAL_SCALE = 2.0**16

T = TypeVar("T")


class ScaleUpdate(NamedTuple):
    """One update of a loss scale, as read on the host.

    Attributes:
        loss_scale: The scale after the update (multiplier).
        overflow: Whether a gradient of this pass held inf or NaN.
        skipped_in_row: Consecutive overflows, including this one; 0 when clean.
    """

    loss_scale: float
    overflow: bool
    skipped_in_row: int


class Readback(Generic[T]):
    """A queue of small tensors being copied to the host.

    ``send`` starts a copy and returns at once; ``poll`` returns completed ones, oldest first. A
    tensor in host memory completes at once.
    """

    def __init__(self) -> None:
        self._copies = deque[tuple[T, HostCopy]]()

    def send(self, source: T, values: Tensor) -> None:
        """Queues the present values of a 1-d tensor, with what they belong to.

        Nothing is queued while a CUDA graph is captured, as a replay has no host side, nor for
        fake tensors, which have no values.
        """
        if is_readable(values) and not capturing(values.device):
            self._copies.append((source, HostCopy(values)))

    def poll(self, *, wait: bool = False) -> list[tuple[T, list[float]]]:
        """Returns readings completed since the last call, oldest first; with ``wait``, all."""
        arrived: list[tuple[T, list[float]]] = []
        while True:
            try:
                source, copy = self._copies.popleft()  # first, as other threads may poll
            except IndexError:
                return arrived
            is_due = wait or copy.arrived
            if not is_due:
                self._copies.appendleft((source, copy))
                return arrived
            values: list[float] = copy.wait().tolist()
            arrived.append((source, values))


class OverflowFlag:
    """Raised by an overflow in any pass since the last step, until a step consumes it.

    The flag is on the device of the last pass, and stays in place there, for CUDA graphs.

    Attributes:
        pending: The flag, 0-d fp32, if a pass has been checked since the last step.
        was_skipped: Whether the last step was skipped: known on the host, or a 0-d fp32 flag.
    """

    def __init__(self) -> None:
        """Starts without a pass."""
        self.was_skipped: Tensor | bool = False
        self.pending: Tensor | None = None
        self._flag: Tensor | None = None
        self._host_copy: HostCopy | None = None
        # What ``was_skipped`` holds on a device, in place, as replays of CUDA graphs write it.
        self._skipped: Tensor | None = None
        # Whether a graph has captured a step: nobody tells that it is replayed.
        self._is_captured = False

    @property
    def device(self) -> torch.device:
        """Where the flag is."""
        return torch.device("cpu") if self._flag is None else self._flag.device

    @untraced
    def add(self, found_inf: Tensor) -> None:
        """Raises the flag if ``found_inf``, 0-d, of one more pass is set."""
        if self._flag is None:
            self._flag = torch.zeros_like(found_inf)
        self._flag = moved(self._flag, found_inf.device)
        if self.pending is None:
            self._flag.copy_(found_inf)
        else:
            torch.maximum(self._flag, found_inf, out=self._flag)
        self.pending = self._flag

    def is_raised(self) -> bool:
        """Returns whether the next step is skipped. Waits for the device."""
        flag = self.pending
        return flag is not None and bool(flag.tolist())  # sync: Python code needs the answer

    @untraced
    def consume(self, skipped: Tensor | bool) -> None:
        """Lowers the flag after a step; records whether it was skipped, perhaps by the flag."""
        self.was_skipped = skipped
        if isinstance(skipped, Tensor):
            if self._skipped is None or self._skipped.device != skipped.device:
                self._skipped = torch.empty_like(skipped)
            self.was_skipped = self._skipped.copy_(skipped)
            self._is_captured |= capturing(skipped.device)
        self.pending = None
        self._host_copy = None

    @untraced
    def await_replay(self) -> None:
        """Lowers the flag, which the next replay of a CUDA graph writes in place."""
        if self._flag is not None:
            self.pending = self._flag.zero_()

    def was_skipped_on_host(self) -> bool | None:
        """Returns whether the last step was skipped, None until the answer has arrived."""
        skipped = self.was_skipped
        if isinstance(skipped, bool):
            return skipped
        if capturing(skipped.device):  # which would repeat the copy
            return None
        if self._host_copy is None:
            self._host_copy = HostCopy(skipped)
        if not self._host_copy.arrived:
            return None
        answer = bool(self._host_copy.wait().tolist())  # sync: none, it has arrived
        if self._is_captured:  # the next replay may give another answer
            self._host_copy = None
        return answer


class Scaler:
    """The scale of one loss; this class has a constant one, and checks no gradients.

    Scale and overflow flag move to the device of each loss that is scaled; they start on the CPU.

    Attributes:
        dynamic: Whether the scale reacts to overflows.
        is_identity: Whether the scale is exactly 1 and gradients are not checked.
        loss_scale: The scale, 0-d fp32 (multiplier).
        found_inf: Whether the present pass overflowed, 0-d fp32.
        rule: The rule of a dynamic scale; changes by :meth:`set_rule`.
        loss_id: Index of the loss in its session, as reports name it.
        awaiting_update: Flags of the optimizers of passes from which the scale is not updated yet,
            as the keys of a dict. The next pass adds to ``found_inf``. They are raised when a block
            updates the scale, and not when a script does.
        own_update: A script's replacement for a dynamic scale's update. It reads and sets flag,
            scale and count itself, and returns whether to skip the step. ``None`` without one.
    """

    dynamic: ClassVar[bool] = False

    def __init__(self, loss_scale: float, rule: ScaleRule) -> None:
        """Starts at ``loss_scale`` (multiplier), on the CPU.

        Raises:
            ValueError: If it is not positive and finite.
        """
        # One tensor holds scale and flag, so that one copy brings both to the host.
        self._scale_and_flag = torch.zeros(2, dtype=torch.float32, device="cpu")
        self.move_to(self._scale_and_flag.device)  # makes the views of it
        self.rule = rule
        self.loss_id = 0
        self.awaiting_update: dict[OverflowFlag, None] = {}
        self.own_update: Callable[[], object] | None = None
        # All steps, which a static scale reports in place of clean ones.
        self._steps = 0
        self.set_scale(loss_scale)

    def use_for(self, loss_id: int, own_update: Callable[[], object] | None = None) -> None:
        """Uses the scale for a loss; a script may replace a dynamic one's update."""
        self.loss_id = loss_id
        self.own_update = own_update

    # -- one backward pass -------------------------------------------------------------------

    def scale(self, loss: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns the loss times the scale, in fp32 (fp64 of an fp64 loss), and that scale.

        The scale is a number, or if dynamic a 0-d tensor that updates do not change.
        """
        is_elsewhere = self.loss_scale.device != loss.device
        if is_elsewhere and loss.device.type != "meta":  # where the scale would lose its value
            self.move_to(loss.device)
        factor = self.factor()
        if loss.dtype not in (torch.float32, torch.float64):
            loss = loss.float()
        # A loss that a script gave a backward of its own, around this pass, would call that again.
        if self.is_identity and "backward" not in vars(loss):
            return loss, factor
        return loss * factor, factor

    def factor(self) -> Tensor | float:
        """Returns the present scale without a host sync: a number, or a 0-d copy if dynamic."""
        return self._scale

    def unscale_(
        self, values: Sequence[Tensor], scale: Tensor | float, overflow: Tensor | None = None
    ) -> None:
        """Divides gradients by a scale, in place; a dynamic scale also checks them.

        Args:
            values: Dense gradients, see :func:`apex._torch.dtensor.dense_values`.
            scale: What :meth:`factor` returned for the pass, or another number.
            overflow: The flag, 0-d fp32, that inf or NaN raises; ``found_inf`` by default.
        """
        if scale != 1.0:
            inverse = 1.0 / float(scale)  # sync: none, it is a number
            foreach.unscale_(values, inverse)

    def await_update(self, flags: Iterable[OverflowFlag]) -> None:
        """Raises flags as well, if the next update finds an overflow."""
        self.awaiting_update.update(dict.fromkeys(flags))

    def end_pass(self) -> Sequence[ScaleUpdate]:
        """Ends a block that updates the scale.

        Returns the updates that have reached the host since the last call, oldest first.
        """
        self.update()
        return ()

    def update(self) -> None:
        """Updates a dynamic scale from its flag, or counts a static one's step."""
        self._steps += 1

    def follow(self, overflow: Tensor, *, counts: bool) -> None:
        """Updates a dynamic scale from gradients of its passes that another pass has checked.

        Args:
            overflow: Whether they overflowed, 0-d fp32.
            counts: Whether the pass counts as a clean one if they did not.
        """

    # -- state -------------------------------------------------------------------------------

    def read_scale(self) -> float:
        """Returns the scale as a number. Syncs with the device if it is dynamic."""
        return self._scale

    def read_growth_tracker(self) -> int:
        """Returns the clean steps since the scale last changed; of a static one, all steps.

        Syncs if it is dynamic.
        """
        return self._steps

    def set_scale(self, loss_scale: float) -> None:
        """Sets the scale. A dynamic one may exceed the rule's bounds until the next update.

        Raises:
            ValueError: If it is not positive and finite.
        """
        self._scale = checked_static(loss_scale)  # exact; fp32 may round it
        self.is_identity = self._scale == 1.0 and not self.dynamic
        self.loss_scale.fill_(self._scale)

    def set_growth_tracker(self, growth_tracker: int) -> None:
        """Sets the count of clean steps; a dynamic scale's stays below the interval."""
        self._steps = growth_tracker

    def set_rule(self, rule: ScaleRule) -> None:
        """Sets the rule without a host sync.

        A count of clean steps at or past the new interval is set just below it, so that the next
        clean step grows the scale.
        """
        self.rule = rule

    def move_to(self, device: torch.device) -> None:
        """Moves scale and flag to ``device``."""
        self._scale_and_flag = moved(self._scale_and_flag, device)
        self.loss_scale = self._scale_and_flag[0]
        self.found_inf = self._scale_and_flag[1]


class DynamicScaler(Scaler):
    """A scale that backs off on overflow and grows after clean steps, all on the device.

    Attributes:
        growth_tracker: Clean steps since the scale last changed, 0-d int32.
    """

    dynamic = True

    def __init__(self, loss_scale: float, rule: ScaleRule) -> None:
        """Starts at ``loss_scale``, clamped to the rule's bounds.

        Raises:
            ValueError: If it is not positive and finite.
        """
        # First, as the base's constructor calls ``move_to``.
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device="cpu")
        initial = checked_static(loss_scale)
        bounded = min(max(initial, rule.least), rule.greatest)
        super().__init__(bounded, rule)
        # Scale and flag after each pass.
        self._readback = Readback[None]()
        # Counted on the host, from what has been read back.
        self._skipped_in_row = 0

    def factor(self) -> Tensor:
        return self.loss_scale.clone()

    def unscale_(
        self, values: Sequence[Tensor], scale: Tensor | float, overflow: Tensor | None = None
    ) -> None:
        """Divides gradients in place, and raises the flag on inf or NaN."""
        if values:
            divisor = as_tensor(scale, self.found_inf.device)
            # Inside a region, the op would cast without ``out``.
            inverse = torch.reciprocal(divisor, out=torch.empty_like(divisor))
            flag = self.found_inf if overflow is None else overflow
            foreach.unscale_and_check_(values, inverse, flag)

    def end_pass(self) -> Sequence[ScaleUpdate]:
        """Also raises the optimizers' flags, and starts to copy scale and flag to the host."""
        flags = self.awaiting_update
        self.awaiting_update = {}
        if self.own_update is None:
            self.update()
        else:
            skips_step = bool(self.own_update())
            self.found_inf.fill_(float(skips_step))
        for flag in flags:
            flag.add(self.found_inf)
        self._readback.send(None, self._scale_and_flag)
        updates = []
        for _, (loss_scale, found_inf) in self._readback.poll():
            overflow = found_inf != 0.0
            if overflow:
                self._skipped_in_row += 1
            else:
                self._skipped_in_row = 0
            update = ScaleUpdate(loss_scale, overflow, self._skipped_in_row)
            updates.append(update)
        return updates

    def update(self) -> None:
        """Updates scale and count as :func:`apex._core.scale.next_scale` does, on the device."""
        rule = self.rule
        foreach.update_scale_(
            self.loss_scale,
            self.growth_tracker,
            self.found_inf,
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
        )
        self.loss_scale.clamp_(rule.least, rule.greatest)
        self.awaiting_update = {}

    def follow(self, overflow: Tensor, *, counts: bool) -> None:
        awaiting = self.awaiting_update
        if not awaiting:
            self.found_inf.zero_()
        torch.maximum(self.found_inf, moved(overflow, self.found_inf.device), out=self.found_inf)
        if not counts:
            self.growth_tracker.sub_(1)  # which the update adds
        self.update()
        self.awaiting_update = awaiting  # for a block's update, which raises them

    def read_scale(self) -> float:
        return float(self.loss_scale)  # sync: the caller asks for a host number

    def read_growth_tracker(self) -> int:
        return int(self.growth_tracker)  # sync: the caller asks for a host number

    def set_growth_tracker(self, growth_tracker: int) -> None:
        greatest = self.rule.growth_interval - 1
        self.growth_tracker.fill_(min(growth_tracker, greatest))

    def set_rule(self, rule: ScaleRule) -> None:
        super().set_rule(rule)
        self.growth_tracker.clamp_(max=rule.growth_interval - 1)

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self.growth_tracker = moved(self.growth_tracker, device)


def scaler_for(loss_scale: LossScale, rule: ScaleRule, *, initial: float = INITIAL_SCALE) -> Scaler:
    """Returns the scaler for ``loss_scale``, a number or ``"dynamic"``.

    A dynamic scale starts at ``initial`` (multiplier), within the rule's bounds.

    Raises:
        ValueError: If the scale is not positive and finite.
    """
    if loss_scale == "dynamic":
        return DynamicScaler(initial, rule)
    return Scaler(loss_scale, rule)
