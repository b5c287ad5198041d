"""One ``scale_loss`` block: scales the loss, unscales the gradients, updates the scale."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from apex._engine.autocast.backward import BackwardAutocast
from apex._engine.gradients import PassGradients
from apex._engine.mistakes import BLOCK, BlockInspection, Mistakes
from apex._torch.copies import capturing
from apex._torch.dynamo import untraced
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._core.op_table import AutocastSpec
    from apex._engine.events import ScaleUpdate
    from apex._engine.optimizer.prepared import PreparedOptimizer
    from apex._engine.scaler import Scaler


class _State(enum.Enum):
    """The state of a pass."""

    NEW = enum.auto()
    OPEN = enum.auto()
    """Autograd computes the gradients."""
    DELAYED = enum.auto()
    """The block has left its gradients scaled, for a later pass to add to and unscale."""
    DONE = enum.auto()


class BackwardPass:
    """Context of one backward pass: returns the scaled loss and leaves unscaled gradients.

    Op casts inside are those of the thread, as in apex; in the pass itself, see Note [Casts in a
    backward pass].

    Attributes:
        gradients: Those of the pass, and of the delayed ones that it continues.
    """

    gradients: PassGradients

    def __init__(
        self,
        loss: Tensor,
        prepared_optimizers: Sequence[PreparedOptimizer],
        scaler: Scaler,
        *,
        ended: Callable[[Sequence[ScaleUpdate], bool], None],
        others: Sequence[PreparedOptimizer] = (),
        casts: AutocastSpec | None = None,
        mistakes: Mistakes,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        """Stores the arguments; the pass begins on entry.

        Args:
            loss: The unscaled loss.
            prepared_optimizers: The optimizers whose gradients the pass computes, and those that
                share a parameter with one.
            scaler: The loss's scale.
            ended: Called with the scale updates that are readable on the host by now, and whether
                an exception ended the pass; not after a pass that defers its scale update.
            others: Other optimizers of the sessions, whose gradients would stay scaled.
            casts: The casts of Python code inside the pass that mixes dtypes; ``None`` for the
                thread's.
            mistakes: Those found in the session, for a pass to add to.
            delay_unscale: Leave the gradients scaled, for a later pass to unscale: the caller asks
                for it, or ranks do not share these gradients yet.
            delay_overflow_check: Leave the scale update to a later pass.
        """
        self._loss, self._prepared_optimizers, self._scaler = loss, prepared_optimizers, scaler
        self._ended, self._others, self._mistakes = ended, others, mistakes
        self._delay_unscale, self._delay_overflow_check = delay_unscale, delay_overflow_check
        self._spec, self._casts = casts, ExitStack()
        self._state = _State.NEW
        self._continued: BackwardPass | None = None
        self._inspection: BlockInspection | None = None

    @untraced
    def __enter__(self) -> Any:
        """Makes room for the gradients and returns the scaled loss (fp32).

        Raises:
            RuntimeError: Inside another block for one of the same optimizers, whose gradients would
                mix before either is unscaled.
        """
        for prepared in self._prepared_optimizers:
            if prepared.open_pass is not None and prepared.open_pass.is_open:
                raise RuntimeError(
                    "amp.scale_loss was entered inside another amp.scale_loss block of the same "
                    "optimizer. Close the first block before the second, or add up the losses in "
                    "one."
                )
        self._finish_others()
        with without_overrides():
            for prepared in self._prepared_optimizers:
                prepared.adopt_new()
            scaled_loss, self._scale = self._scaler.scale(self._loss)
            self._scale_version = self._scaler.version
            self._make_room()
        try:
            if self._spec is not None:
                self._casts.enter_context(BackwardAutocast(self._spec))
            self._inspect(scaled_loss)
        except BaseException:
            self._casts.close()
            self._abort()
            raise
        return scaled_loss

    def _inspect(self, scaled_loss: Tensor) -> None:
        if self.gradients.scaled and self._continued is None and self._mistakes.blocks_left:
            self._inspection = BlockInspection(
                self._mistakes, self._prepared_optimizers, self._others, scaled_loss
            )

    def _finish_others(self) -> None:
        """Unscales what earlier passes left scaled, unless this one continues it."""
        waiting: dict[int, BackwardPass] = {}
        for prepared in self._prepared_optimizers:
            opened: Any = prepared.open_pass
            if opened is not None and not opened.is_open:
                waiting[id(opened)] = opened
        for delayed in waiting.values():
            if len(waiting) == 1 and self._continues(delayed):
                self._continued = delayed
            else:
                delayed.finish()

    def _continues(self, delayed: BackwardPass) -> bool:
        """Returns whether the pass may add to gradients left scaled: one scale, and one owner."""
        same_scale = (
            delayed._scaler is self._scaler and delayed._scale_version == self._scaler.version
        )
        return same_scale and {*map(id, delayed._kept())} == {*map(id, self._prepared_optimizers)}

    def _make_room(self) -> None:
        if self._continued is not None:
            self.gradients = self._continued.gradients
        else:
            self.gradients = PassGradients(
                (pair for prepared in self._prepared_optimizers for pair in prepared.pairs),
                (param for prepared in self._prepared_optimizers for param in prepared.params()),
                (pair for other in self._others for pair in other.pairs),
                scaled=not self._scaler.is_identity,
            )
            self.gradients.make_room()
        self._state = _State.OPEN
        for prepared in self._prepared_optimizers:
            prepared.open_pass, prepared.used, prepared.got_scaled = self, True, False

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Raises: this is the context of the pass, and its loss is what ``with`` yields."""
        raise RuntimeError(f"amp.scale_loss returns a context, not the scaled loss. Write\n{BLOCK}")

    @property
    def is_open(self) -> bool:
        """Whether the block has been entered and not left."""
        return self._state is _State.OPEN

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Unscales the gradients; after an exception, restores the earlier ones."""
        self._casts.close()
        inspection, self._inspection = self._inspection, None
        if error is not None:
            self._abort()
            return
        if inspection is not None:
            inspection.end_of_gradients()
        if not self._delay_unscale:
            self.finish()
        elif self._state is _State.OPEN:  # else a step inside the block has unscaled them
            self._state = _State.DELAYED
        if inspection is not None:
            inspection.warn()

    def _kept(self) -> list[PreparedOptimizer]:
        """Returns the optimizers whose gradients have not been cleared since a delayed block."""
        return [prepared for prepared in self._prepared_optimizers if prepared.open_pass is self]

    def finish(self) -> None:
        """Unscales the gradients and updates the scale, once."""
        prepared_optimizers = self._kept()
        if self._state not in (_State.OPEN, _State.DELAYED):
            return
        if self._inspection is not None:  # in a step inside the block
            self._inspection.end_of_gradients()
        self._state = _State.DONE
        pending = self._scaler.pending
        try:
            if prepared_optimizers:
                with without_overrides():
                    self._unscale(prepared_optimizers)
                if capturing(self._loss.device):
                    for prepared in prepared_optimizers:
                        prepared.keep_captured()
        except BaseException:
            self._scaler.pending = pending
            self.gradients.restore()
            raise
        finally:
            for prepared in prepared_optimizers:
                prepared.open_pass = None
        if prepared_optimizers and not self._delay_overflow_check:
            self._ended(self._scaler.read_updates(), False)

    def _unscale(self, prepared_optimizers: Sequence[PreparedOptimizer]) -> None:
        scaler = self._scaler
        scaler.begin_pass()
        if self.gradients.scaled:
            self.gradients.receive(scaler, self._scale)
        moves = not self._delay_overflow_check
        own = scaler.own_update if moves else None
        if scaler.dynamic:
            scaler.share_overflow(
                [param for prepared in prepared_optimizers for param in prepared.params()]
            )
            if own is not None:
                scaler.found_inf.fill_(float(bool(own())))
            for prepared in (
                prepared_optimizers if moves else ()
            ):  # else the later pass flags for both
                prepared.note_overflow(scaler.found_inf)
        if moves:
            scaler.update(len(prepared_optimizers), own=own is not None)

    def _abort(self) -> None:
        """Drops the gradients of the pass; one that continues others leaves what it added."""
        if self._state is not _State.OPEN:
            return
        self._state = _State.DONE
        if self._continued is None:
            self.gradients.restore()
        for prepared in self._prepared_optimizers:
            prepared.open_pass = self._continued
        self._ended((), True)
