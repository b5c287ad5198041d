"""One ``scale_loss`` block: scales the loss, unscales the gradients, updates the scale.

Note [Stashed gradients]
    A pass with a loss scale starts without gradients: those from before are stashed in the
    session's table, by parameter, and added when the pass is unscaled. Clearing a parameter's
    gradient clears it there, too. A delayed pass leaves its gradients scaled, and the next one adds
    to them in place, as ranks under ``no_sync`` require.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from apex._core import finite
from apex._engine.autocast.backward import BackwardAutocast
from apex._engine.masters import MasterPair, fp32_copies, move_grads_to_masters
from apex._engine.mistakes import BLOCK, BlockInspection, Mistake, Mistakes
from apex._engine.scaler import Scaler, ScaleUpdate
from apex._torch import foreach
from apex._torch.copies import capturing
from apex._torch.dynamo import untraced
from apex._torch.parameters import grad_of, set_grad, without_overrides

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


@dataclass(eq=False)
class BackwardPass:
    """Context of one backward pass: returns the scaled loss and leaves unscaled gradients.

    Op casts inside are those of the thread, as in apex; in the pass itself, see Note [Casts in a
    backward pass].

    Attributes:
        loss: The unscaled loss.
        prepared_optimizers: The optimizers whose gradients the pass computes, and those that share
            a parameter with one.
        scaler: The loss's scale.
        ended: Called with the scale updates that are readable on the host by now, and whether an
            exception ended the pass; not after a pass that defers its scale update.
        others: Other optimizers, whose gradients would stay scaled.
        spec: The casts of Python code inside the pass that mixes dtypes; ``None`` for the
            thread's.
        mistakes: Those found in the session, for a pass to add to.
        delay_unscale: Leave the gradients scaled, for a later pass to unscale: the caller asks for
            it, or ranks do not share these gradients yet.
        delay_overflow_check: Leave the scale update to a later pass.
        scaled: Whether the parameters' gradients are not those of the loss until the pass ends.
    """

    loss: Tensor
    prepared_optimizers: Sequence[PreparedOptimizer]
    scaler: Scaler
    ended: Callable[[Sequence[ScaleUpdate], bool], None]
    others: Sequence[PreparedOptimizer]
    spec: AutocastSpec | None
    mistakes: Mistakes
    delay_unscale: bool
    delay_overflow_check: bool
    scaled: bool = field(init=False)
    _state: _State = field(default=_State.NEW, init=False)
    _autocast: ExitStack = field(default_factory=ExitStack, init=False)
    _inspection: BlockInspection | None = field(default=None, init=False)
    # The delayed pass whose gradients this one adds to.
    _continued: BackwardPass | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Finds out whether the gradients are scaled."""
        # A session with a scale may lend its optimizers to a loss without one, and the reverse.
        self.scaled = not self.scaler.is_identity
        for prepared in self.prepared_optimizers:
            if not prepared.masters.lazy and prepared.pairs:
                self.scaled = True

    @untraced
    def __enter__(self) -> Any:
        """Makes room for the gradients and returns the scaled loss (fp32).

        Raises:
            RuntimeError: Inside another block for one of the same optimizers, whose gradients would
                mix before either is unscaled.
        """
        for prepared in self.prepared_optimizers:
            if prepared.open_pass is not None and prepared.open_pass.is_open:
                raise RuntimeError(
                    "amp.scale_loss was entered inside another amp.scale_loss block of the same "
                    "optimizer. Close the first block before the second, or add up the losses in "
                    "one."
                )
        self._continue_or_finish_delayed()
        self._captures = capturing(self.loss.device)
        with without_overrides():
            for prepared in self.prepared_optimizers:
                prepared.create_missing_masters()
            scaled_loss, self._scale = self.scaler.scale(self.loss)
        self._scale_version = self.scaler.version
        if self.mistakes.blocks_left:
            self._inspect(scaled_loss)
        self._state = _State.OPEN
        try:
            if self._continued is None:
                with without_overrides():
                    make_room(self.prepared_optimizers, scaled=self.scaled)
            for prepared in self.prepared_optimizers:
                prepared.open_pass = self
                prepared.had_block = True
            if self.spec is not None:
                self._autocast.enter_context(BackwardAutocast(self.spec))
        except BaseException:
            self._autocast.close()
            self._abort()
            raise
        return scaled_loss

    def _inspect(self, scaled_loss: Tensor) -> None:
        """Looks for mistakes before the block, and begins to look for those inside."""
        if self._continued is not None:
            self.mistakes.inspect_delayed(self.prepared_optimizers)
            return
        self.mistakes.blocks_left -= 1
        if self.scaled:
            self._inspection = BlockInspection(
                self.mistakes, self.prepared_optimizers, self.others, scaled_loss
            )

    def _continue_or_finish_delayed(self) -> None:
        """Unscales what earlier passes left scaled, unless this one continues the only one."""
        passes: dict[BackwardPass, None] = {}
        for prepared in self.prepared_optimizers:
            if prepared.open_pass is not None:
                passes[prepared.open_pass] = None
        for delayed in passes:
            if len(passes) == 1 and self._continues(delayed):
                self._continued = delayed
            else:
                delayed.finish()

    def _continues(self, delayed: BackwardPass) -> bool:
        """Returns whether the pass may add to gradients left scaled: one scale, same optimizers."""
        if delayed.scaler is not self.scaler or delayed._scale_version != self.scaler.version:
            return False
        return {*delayed._unfinished()} == {*self.prepared_optimizers}

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
        exception_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Unscales the gradients; after an exception, restores the earlier ones."""
        self._autocast.close()
        inspection = self._inspection
        if error is not None:
            if inspection is not None:
                inspection.close()
            self._abort()
            return
        if inspection is not None:
            inspection.end_of_gradients()
        if not self.delay_unscale:
            self.finish()
        elif self._state is _State.OPEN:  # else a step inside the block has unscaled them
            self._state = _State.DELAYED
        if self.scaled and self.mistakes.blocks_left:
            self.mistakes.mark_scaled_grads(
                self.prepared_optimizers, delayed=self._state is _State.DELAYED
            )
        if inspection is not None:
            inspection.warn()

    def _unfinished(self) -> list[PreparedOptimizer]:
        """Returns the optimizers whose gradients have not been cleared since a delayed block."""
        return [prepared for prepared in self.prepared_optimizers if prepared.open_pass is self]

    def finish(self) -> None:
        """Unscales the gradients and updates the scale, once."""
        if self._state not in (_State.OPEN, _State.DELAYED):
            return
        captures = capturing(self.loss.device)
        if self._captures and not captures:
            raise RuntimeError(
                "A CUDA graph has captured a block of amp.scale_loss with delay_unscale=True, but "
                "not the last block of the step: the gradients of later replays would stay scaled. "
                "Capture the last block, too, without delay_unscale."
            )
        if self._inspection is not None:  # in a step inside the block
            self._inspection.end_of_gradients()
        self._state = _State.DONE
        prepared_optimizers = self._unfinished()
        if not prepared_optimizers:
            return
        unchecked = {**self.scaler.unchecked}
        try:
            with without_overrides():
                self._unscale(prepared_optimizers)
            if captures:
                for prepared in prepared_optimizers:
                    prepared.keep_captured()
        except BaseException:
            self.scaler.unchecked = unchecked
            restore_grads(prepared_optimizers, scaled=self.scaled)
            raise
        finally:
            for prepared in prepared_optimizers:
                prepared.open_pass = None
        if not self.delay_overflow_check:
            self.ended(self.scaler.read_updates(), False)

    def _unscale(self, prepared_optimizers: Sequence[PreparedOptimizer]) -> None:
        scaler = self.scaler
        scaler.begin_pass()
        if self.scaled:
            unscale_grads(prepared_optimizers, scaler, self._scale)
        if scaler.dynamic:
            for prepared in prepared_optimizers:
                scaler.unchecked[prepared.overflow] = None
            scaler.share_overflow(_params_of(prepared_optimizers))
        if not self.delay_overflow_check:
            scaler.end_pass(len(prepared_optimizers))

    def _abort(self) -> None:
        """Drops the gradients of the pass; one that continues others leaves what it added."""
        if self._state is not _State.OPEN:
            return
        self._state = _State.DONE
        if self._continued is None:
            restore_grads(self.prepared_optimizers, scaled=self.scaled)
        for prepared in self.prepared_optimizers:
            prepared.open_pass = self._continued
        self.ended((), True)
        if self._continued is not None and self.scaled:
            self.mistakes.mark_scaled_grads(self.prepared_optimizers, delayed=True)
            self.mistakes.warn(Mistake.FAILED_AFTER_DELAYED)


# -- gradients ------------------------------------------------------------------------------------


def _params_of(prepared_optimizers: Sequence[PreparedOptimizer]) -> list[Tensor]:
    """Returns what optimizers step, each parameter once."""
    params: dict[int, Tensor] = {}
    for prepared in prepared_optimizers:
        for param in prepared.params():
            params[id(param)] = param
    return [*params.values()]


def make_room(prepared_optimizers: Sequence[PreparedOptimizer], *, scaled: bool) -> None:
    """Moves pending gradients to the masters; before a scaled pass, stashes all gradients."""
    for prepared in prepared_optimizers:
        if prepared.masters.lazy:
            move_grads_to_masters(prepared.pairs)
        if scaled:
            prepared.stash_grads()


def unscale_grads(
    prepared_optimizers: Sequence[PreparedOptimizer], scaler: Scaler, scale: Tensor | float
) -> None:
    """Gives stepped parameters their unscaled gradients, plus those stashed.

    The model keeps its own, multiplied by ``scale``, where its session has a scale.
    """
    # Also those of masters that the loss uses themselves.
    scaler.unscale_(finite.values_of(_params_of(prepared_optimizers)), scale)
    pairs: dict[MasterPair, None] = {}  # optimizers may share some
    for prepared in prepared_optimizers:
        pairs.update(dict.fromkeys(prepared.pairs))
    masters: list[Tensor] = []
    grads: list[Tensor] = []
    for pair in pairs:
        grad = pair.model.grad
        if grad is not None:
            masters.append(pair.master)
            grads.append(grad)
    copies = fp32_copies(grads, masters)
    scaler.unscale_(finite.dense_values(copies), scale)
    _add_grads(masters, copies)
    _add_stashed(prepared_optimizers)


def restore_grads(prepared_optimizers: Sequence[PreparedOptimizer], *, scaled: bool) -> None:
    """Drops the gradients of a pass that failed, and returns those that were stashed."""
    for prepared in prepared_optimizers:
        for pair in prepared.pairs:
            pair.model.grad = None
        if scaled:
            for param in prepared.params():
                set_grad(param, None)
    _add_stashed(prepared_optimizers)


def _add_stashed(prepared_optimizers: Sequence[PreparedOptimizer]) -> None:
    params: list[Tensor] = []
    grads: list[Tensor] = []
    for prepared in prepared_optimizers:
        stashed = prepared.masters.stashed
        if not stashed:
            continue
        for param in prepared.params():
            if id(param) not in stashed:
                continue
            grad = grad_of(param)
            set_grad(param, stashed.pop(id(param))[1])
            if grad is not None:
                params.append(param)
                grads.append(grad)
    if params:
        _add_grads(params, grads)


def _add_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Adds gradients, which are not needed again, to those of parameters."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        total = grad_of(param)
        if total is None:
            set_grad(param, grad)
        elif total.layout is not torch.strided or grad.layout is not torch.strided:
            # torch adds sparse to dense, not dense to sparse.
            set_grad(param, total + grad if grad.is_sparse else grad + total)
        elif total.requires_grad or grad.requires_grad:
            set_grad(param, total + grad)
        else:
            totals.append(total)
            added.append(grad)
    foreach.add_(finite.dense_values(totals), finite.dense_values(added))
