"""One ``scale_loss`` block: scales the loss, unscales the gradients, updates the scale."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from apex._core import finite
from apex._engine.autocast.backward import BackwardAutocast
from apex._engine.masters import MasterPair, fp32_copies, take
from apex._engine.mistakes import BLOCK, BlockInspection, Mistakes
from apex._engine.scaler import Scaler, ScaleUpdate
from apex._torch import dtensor, parameters
from apex._torch.copies import capturing
from apex._torch.dynamo import untraced
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._core.op_table import AutocastSpec
    from apex._engine.optimizer.prepared import PreparedOptimizer


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


# -- gradients ------------------------------------------------------------------------------------


class PassGradients:
    """The gradients of the optimizers of one pass, each parameter once.

    See Note [One gradient in one place].

    Attributes:
        scaled: Whether the pass has a loss scale.
    """

    def __init__(
        self,
        pairs: Iterable[MasterPair],
        params: Iterable[nn.Parameter],
        others: Iterable[MasterPair] = (),
        *,
        scaled: bool,
    ) -> None:
        """Stores what the optimizers of the pass step.

        Args:
            pairs: Model parameters with their masters.
            params: All that is stepped, masters included.
            others: Those of other optimizers, which the pass may reach, too.
            scaled: Whether the pass has a loss scale.
        """
        self.scaled = scaled
        self._pairs = list({id(pair): pair for pair in pairs}.values())
        self._stepped = list({id(each): each for each in params}.values()) if scaled else []
        self._others = list(others) if scaled else []
        self._aside: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def make_room(self) -> None:
        """Moves what waits on models to the masters; with a scale, sets that of masters aside."""
        take(self._pairs)
        for param in self._stepped:
            if (grad := parameters.grad_of(param)) is not None:
                self._aside[id(param)] = param, _kept(grad)
        for param, _ in self._aside.values():
            parameters.set_grad(param, None)
        for pair in self._pairs:
            if pair.scaled:
                pair.model.grad = None
        self.mark()
        for pair in self._others:
            # What reaches them is scaled by a scale that their optimizer's own pass does not know.
            pair.scaled = pair.scaled or pair.model.grad is None

    def mark(self) -> None:
        """Records that gradients which arrive on models are those of the pass."""
        for pair in self._pairs:
            pair.scaled = self.scaled

    def note_cleared(self, params: set[int]) -> None:
        """Drops what was set aside for the parameters with these ids, which were cleared."""
        self._aside = {key: each for key, each in self._aside.items() if key not in params}
        self.mark()

    def leave_out(self, params: set[int]) -> None:
        """Leaves out the parameters with these ids, whose gradients have been cleared."""
        self._pairs = [pair for pair in self._pairs if id(pair.master) not in params]
        self._stepped = [param for param in self._stepped if id(param) not in params]

    def receive(self, scaler: Scaler, scale: Tensor | float) -> None:
        """Gives what is stepped its unscaled gradients, plus those set aside.

        The model keeps its own, which are multiplied by ``scale``.
        """
        # Also those of masters that the loss uses themselves.
        scaler.unscale_(finite.values_of(self._stepped), scale)
        found = [(pair, grad) for pair in self._pairs if (grad := pair.model.grad) is not None]
        masters = [pair.master for pair, _ in found]
        copies = fp32_copies([grad for _, grad in found], masters)
        scaler.unscale_(finite.dense_values(copies), scale)
        _add(masters, copies)
        aside, self._aside = list(self._aside.values()), {}
        arrived = [(p, value) for p, _ in aside if (value := parameters.grad_of(p)) is not None]
        for param, grad in aside:
            parameters.set_grad(param, grad)
        _add([param for param, _ in arrived], [value for _, value in arrived])

    def restore(self) -> None:
        """Drops the gradients of a pass that failed, and returns those that were set aside."""
        for pair in self._pairs:
            pair.model.grad, pair.scaled = None, False
        for param in self._stepped:
            parameters.set_grad(param, None)
        for param, grad in self._aside.values():
            parameters.set_grad(param, grad)
        self._aside = {}


def _kept(grad: Tensor) -> Tensor:
    """Returns a gradient that the next pass leaves alone: of a view of a bucket, a copy."""
    strided = grad.layout is torch.strided and not dtensor.is_dtensor(grad)
    shares = strided and grad.untyped_storage().nbytes() != grad.nbytes
    return grad.clone() if shares else grad


def _add(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Adds gradients, which are not needed again, to those of parameters."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for param, value in zip(params, values, strict=True):
        total = parameters.grad_of(param)
        if total is None:
            parameters.set_grad(param, value)
        elif total.layout is not torch.strided or value.layout is not torch.strided:
            # torch adds sparse to dense, not dense to sparse.
            both = total + value if value.is_sparse else value + total
            parameters.set_grad(param, both)
        elif total.requires_grad or value.requires_grad:
            parameters.set_grad(param, total + value)
        else:
            totals.append(total)
            added.append(value)
    if totals:
        torch._foreach_add_(finite.dense_values(totals), finite.dense_values(added))
