"""What is said of mistakes in training loops, and of what 16 bits lose.

Sessions have a :class:`Watch` as their observer. With a plain one, amp computes the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

from torch import Tensor, nn

from apex._core import tree
from apex._engine.backward import BackwardPass
from apex._engine.conversion.state import ModelState
from apex._engine.watch.losses import Losses
from apex._engine.watch.mistakes import Mistakes
from apex._engine.watch.writes import Writes, log_lost


class Watch(Mistakes):
    """Warns of mistakes in the loop of one session, and of what its 16-bit models lose."""

    def __init__(self) -> None:
        """Starts without models."""
        super().__init__()
        self._losses = Losses()
        self._writes = weakref.WeakKeyDictionary[ModelState, Writes]()

    def _writes_of(self, state: ModelState) -> Writes:
        writes = self._writes.get(state)
        if writes is None:
            writes = self._writes[state] = Writes()
        return writes

    def block_begins(self, block: BackwardPass, scaled_loss: Tensor) -> None:
        """Also checks a loss with a static scale."""
        super().block_begins(block, scaled_loss)
        if not block.scaler.dynamic:
            self._losses.check(block.scaler.loss_id, block.loss)

    def model_used(self, state: ModelState, reader: FrameType | None) -> None:
        """Also logs the fix of torch's error about ``lerp_`` from 16-bit weights to a copy."""
        super().model_used(state, reader)
        if reader is not None and state.was_copied:
            self._writes_of(state).check_average(reader)

    def forward_begins(
        self,
        model: nn.Module,
        state: ModelState,
        forward: Callable[..., Any],
        given: tree.Call,
        cast: tree.Call,
        until: ExitStack,
    ) -> None:
        """Watches what a forward pass of a 16-bit model loses."""
        if state.plan.casts_down:
            writes = self._writes_of(state)
            if writes.left > 0:
                until.enter_context(writes.watch(model, state, forward, given, cast))

    def loading(self, state: ModelState) -> None:
        """Starts anew: tensors that a load writes are neither averages nor counters."""
        self._writes_of(state).note_load()

    def converted(self, model: nn.Module, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Logs the buffers whose order rounding loses."""
        log_lost(model, before)
