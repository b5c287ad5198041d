"""One ``scale_loss`` block: scales the loss, unscales the gradients, updates the scale.

Note [What a pass reaches]
    A pass with a loss scale starts without gradients: those from before are put aside, and added
    at the end of the block, when the pass is unscaled. So gradients are scaled inside a block only.

    A delayed block leaves them unchecked, and so does one whose gradients ranks have yet to share,
    as under ``no_sync``. The next block scales what they have left, and adds to it in place: it
    checks the sum, and wrappers and scripts average the sum over ranks. If a delayed block leaves
    some gradients of a forward pass to DistributedDataParallel, which averages all of them at once,
    they stay scaled until the next block.

    A pass may reach more than its optimizers step: a GAN's generator is trained through the
    discriminator. So the thread's other optimizers, and parameters that none steps, lend their
    gradients to the block: they are put aside and unscaled, too. Not what other threads train, or
    may train next: a pool moves optimizers, which then lend within their sessions only. Each lender
    has its own check: if its gradients overflow, it skips its next step, unless they are cleared
    before.

    A check updates the scales of all passes that have added to the gradients: an overflow lowers
    each of them. Those of a lender's are lowered when it skips its step.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from apex._engine.autocast.ambient import follow_sessions
from apex._engine.autocast.backward import BackwardAutocast
from apex._engine.conversion import hints
from apex._engine.masters import remove_grads
from apex._engine.optimizer.prepared import (
    PreparedOptimizer,
    grads_of,
    reachable,
    unscale_grads,
    with_sharers,
)
from apex._engine.passes import return_views
from apex._engine.scaler import OverflowFlag, Scaler, ScaleUpdate
from apex._engine.session import Session
from apex._engine.stash import Stash
from apex._engine.wrappers import fsdp
from apex._engine.wrappers.ddp import wrappers
from apex._torch import dtensor
from apex._torch.copies import capturing, moved
from apex._torch.dynamo import untraced
from apex._torch.parameters import without_overrides

BLOCK = "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"


class _State(enum.Enum):
    """The state of a pass."""

    NEW = enum.auto()
    OPEN = enum.auto()
    """Autograd computes the gradients."""
    DELAYED = enum.auto()
    """The block has left its gradients unchecked, for a later pass or a step to check."""
    DONE = enum.auto()
    FAILED = enum.auto()
    """An exception ended the block."""


class BackwardPass:
    """Context of one backward pass: returns the scaled loss and leaves unscaled gradients.

    The thread's op casts apply inside the block, as in apex. For the pass itself, see Note [Casts
    in a backward pass].
    """

    def __init__(
        self,
        session: Session,
        loss: Tensor,
        named: Sequence[PreparedOptimizer],
        scaler: Scaler,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        """Prepares a pass, which begins with the block.

        Args:
            session: The session that scales the loss.
            loss: The unscaled loss.
            named: Optimizers of any sessions.
            scaler: The loss's scale.
            delay_unscale: Leave the gradients unchecked, for a later pass to check.
            delay_overflow_check: Leave the scale update to a later pass.
        """
        follow_sessions()
        self.session = session
        self.loss = loss
        self.scaler = scaler
        # Those that the script named, and those that share a parameter with one. A delayed pass
        # forgets those whose gradients are cleared, or checked by a later one.
        self.prepared_optimizers = with_sharers(named)
        # An overflow is that of others for sharers, which may take turns with these.
        self._named = named
        # Whether gradients are multiplied by a loss scale until the pass ends. A session with a
        # scale may be used with a loss of a session without one, and the reverse.
        self.scaled = not scaler.is_identity
        # Scale updates that arrived at its end; on a device, from earlier passes.
        self.updates: Sequence[ScaleUpdate] = ()
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        # The casts of the pass, and the scale of what FSDP2 keeps of earlier ones.
        self._until_end = ExitStack()
        self._state = _State.NEW
        # The delayed passes of its optimizers and lenders, which it checks with its own gradients.
        self._earlier: dict[PreparedOptimizer, BackwardPass] = {}
        # The optimizers whose gradients it adds to in place, scaled: a delayed pass has left them,
        # or ranks have yet to share them.
        self._adding: list[PreparedOptimizer] = []
        # Its optimizers whose gradients ranks do not share in this pass.
        self._unsent: list[PreparedOptimizer] = []
        # Other optimizers whose gradients the pass may reach, until the block ends.
        self._lenders: list[PreparedOptimizer] = []
        # Parameters that no optimizer steps, and their gradients from before the block.
        self._unowned: list[nn.Parameter] = []
        self.stash = Stash()
        # The scale of this pass, which updates do not change.
        self._scale: Tensor | float = 1.0
        # Whether a CUDA graph captures the block: it may not be finished outside of the graph.
        self._is_captured = False

    @untraced
    def __enter__(self) -> Any:
        """Makes room for the gradients and returns the scaled loss (fp32).

        Raises:
            RuntimeError: A second time, and inside another block for one of the same optimizers,
                whose gradients would mix before either is unscaled.
        """
        if self._state is not _State.NEW:
            raise RuntimeError(
                "amp.scale_loss(loss, optimizer) is the context of one pass, and it was entered "
                f"again. Call it anew for each pass:\n{BLOCK}"
            )
        self._end_earlier_loans()
        self._is_captured = capturing(self.loss.device)
        with without_overrides():
            self._share_masters()
            scaled_loss, self._scale = self.scaler.scale(self.loss)
        self.session.observer.block_begins(self, scaled_loss)
        self._state = _State.OPEN
        try:
            with without_overrides():
                self._make_room()
                if self.scaled and fsdp.groups:
                    fsdp.multiply_unsent(self._scale, sends=True)
                    unscale = 1.0 / self._scale
                    self._until_end.callback(fsdp.multiply_unsent, unscale, sends=False)
            if self.session.spec is not None:  # casts Python code in the pass that mixes dtypes
                self._until_end.enter_context(BackwardAutocast(self.session.spec))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return scaled_loss

    def _share_masters(self) -> None:
        """Makes masters equal on all ranks, or delays where ranks do not share this pass."""
        for prepared in self.prepared_optimizers:
            prepared.create_missing_masters()
            prepared.begin_first_block()
            if not (wrappers.states or fsdp.groups):
                continue
            trained = prepared.trained_params()
            if fsdp.reduces(trained) and wrappers.shares(trained):
                wrappers.share_masters(trained)
            else:
                self._unsent.append(prepared)
                self._delay_unscale = True

    def _note_shared(self) -> None:
        """Records whether ranks have shared the gradients, where nothing tells of the pass."""
        for prepared in self.prepared_optimizers:
            if wrappers.states:
                is_sent = prepared not in self._unsent
                wrappers.end_block(prepared.trained_params(), is_sent=is_sent)

    def borrowable(self) -> tuple[list[PreparedOptimizer], list[nn.Parameter]]:
        """Returns the other optimizers, and parameters that none steps, that the pass may reach."""
        if not self.scaled or not self.prepared_optimizers:  # the loss is only scaled
            return [], []
        return reachable(self.session, self.prepared_optimizers)

    def _end_earlier_loans(self) -> None:
        """Takes gradients back that the optimizers have lent.

        Raises:
            RuntimeError: If the pass of one is open.
        """
        lent: list[tuple[PreparedOptimizer, BackwardPass]] = []
        for prepared in self.prepared_optimizers:
            earlier = prepared.unfinished_pass
            if not isinstance(earlier, BackwardPass):
                continue
            if prepared in earlier._lenders:
                lent.append((prepared, earlier))
            elif earlier.is_open:
                raise RuntimeError(
                    "amp.scale_loss was entered inside another amp.scale_loss block of the same "
                    "optimizer. Close the first block before the second, or add up the losses in "
                    "one."
                )
            elif earlier.scaled and earlier.scaler is not self.scaler:
                raise RuntimeError(
                    "DistributedDataParallel averages the gradients of one forward pass together, "
                    "but its losses have different scales (loss_id). Pass the same loss_id, or add "
                    "up the losses in one block."
                )
        for lender, borrower in lent:
            borrower.end_loan(lender)

    def _make_room(self) -> None:
        """Makes room for the gradients of all that the pass may reach."""
        lenders, unowned = self.borrowable()
        own = self.prepared_optimizers
        for prepared in (*own, *lenders):
            prepared.settle_overflow(takes=prepared in self._named)
            earlier = prepared.unfinished_pass
            if isinstance(earlier, BackwardPass):
                self._earlier[prepared] = earlier
        for group in (own, lenders):
            is_left = any(map(self._is_left, group))
            # A rank without gradients has none to put aside, so it need not agree with others.
            if is_left and any(map(PreparedOptimizer.has_grads, group)):
                self._adding += group
        self._scale_left()
        for prepared in own:
            prepared.begin_pass(self, in_place=prepared in self._adding)
        for lender in lenders:
            lender.begin_pass(self, in_place=lender in self._adding)
            self._lenders.append(lender)
        if unowned:
            self.stash.put_aside(unowned, wrappers.reused(unowned))
            self._unowned = unowned

    def _scale_left(self) -> None:
        """Scales the gradients that it adds to in place, if an earlier pass has unscaled them."""
        unscaled: list[PreparedOptimizer] = []
        for prepared in self._adding:
            before = self._earlier.get(prepared)
            if before is None or not before.scaled:
                unscaled.append(prepared)
        if unscaled and self.scaled:
            values = dtensor.values_of(grads_of(unscaled))
            unchecked = torch.zeros_like(self.scaler.found_inf)
            self.scaler.unscale_(values, 1.0 / self._scale, unchecked)
        for earlier in self._earlier.values():
            earlier._leave_unscaled()  # this pass unscales what it may have left scaled

    def _is_left(self, prepared: PreparedOptimizer) -> bool:
        """Returns whether gradients are unchecked and not cleared, or unsent and sent by this pass.

        All ranks agree on the latter, also one that has not used a parameter that others have.
        """
        if wrappers.states and wrappers.sends_earlier(prepared.trained_params()):
            return True
        return prepared in self._earlier and prepared.has_grads()

    @untraced
    def end_loan(self, lender: PreparedOptimizer) -> None:
        """Unscales what the pass has put into a lender's gradients, and adds the earlier ones.

        The same for lenders that share parameters with it.
        """
        sharing = with_sharers([lender])
        lenders = [prepared for prepared in sharing if prepared in self._lenders]
        with without_overrides():
            overflow = self._unscale_apart(grads_of(lenders))
            for prepared in lenders:
                self._lenders.remove(prepared)
                prepared.end_pass()
                prepared.stash.give_back()
                if overflow is not None:
                    prepared.add_overflow_of_others(overflow, self._scalers_of([prepared]))

    def _unscale_apart(self, params: Collection[nn.Parameter]) -> Tensor | None:
        """Unscales gradients; returns whether they overflow, ``None`` if that is not checked."""
        values = dtensor.values_of(params)
        if not values:
            return None
        overflow = torch.zeros_like(self.scaler.found_inf)
        self.scaler.unscale_(values, self._scale, overflow)
        if not self.scaler.dynamic:
            return None
        dtensor.share_flag_(overflow, params)
        return overflow

    def _end_loans(self, *, failed: bool = False) -> None:
        """Gives back all gradients that were lent; without the pass's own if it ``failed``."""
        if failed:
            remove_grads(self._unowned)
            for lender in self._lenders:
                if lender not in self._adding:
                    remove_grads(lender.trained_params())
        for lender in [*filter(PreparedOptimizer.has_grads, self._lenders)]:
            self.end_loan(lender)  # does nothing if a sharer's loan has ended it
        for lender in self._lenders:  # the pass has reached none of their parameters
            lender.end_pass()
            lender.stash.give_back()
        self._lenders = []
        if not self._unowned:
            return
        with without_overrides():
            overflow = self._unscale_apart(self._unowned)
            if overflow is not None:
                # No step of a prepared optimizer would skip them.
                for value in dtensor.values_of(self._unowned):
                    value.masked_fill_(moved(overflow, value.device) != 0, 0.0)
            self.stash.give_back()
        self._unowned = []

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Raises: this is the context of the pass, and its loss is what ``with`` yields."""
        raise RuntimeError(f"amp.scale_loss returns a context, not the scaled loss. Write\n{BLOCK}")

    @property
    def is_open(self) -> bool:
        """Whether the block has been entered and not left."""
        return self._state is _State.OPEN

    @property
    def adds_in_place(self) -> bool:
        """Whether it adds to earlier gradients of its optimizers in place."""
        return any(prepared in self._adding for prepared in self.prepared_optimizers)

    @property
    def failed(self) -> bool:
        """Whether an exception ended the block."""
        return self._state is _State.FAILED

    @untraced
    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Unscales the gradients; after an exception, also here, restores the earlier ones."""
        if isinstance(error, RuntimeError):
            hints.explain_hook(error)
        try:
            self._until_end.close()
            self.session.observer.pass_ends(self)
            if error is None:
                self._end_loans()
                if self._delay_unscale:
                    self._leave_unchecked()
                else:
                    self._finish()
                self._note_shared()
        finally:
            if self._state is _State.OPEN:
                self._abort()
            return_views()
            self.session.observer.block_ends(self)

    def forget(self, prepared: PreparedOptimizer) -> None:
        """Ends a delayed pass for an optimizer whose gradients it is not to check any more."""
        prepared.end_pass()
        self.prepared_optimizers.remove(prepared)

    def finish_for(self, prepared: PreparedOptimizer) -> None:
        """Finishes the pass for an optimizer that steps: one of its own, or a lender."""
        if prepared in self._lenders:
            self.end_loan(prepared)
            return
        if self._state is _State.OPEN:
            self.session.observer.pass_ends(self)
        self._finish()

    def _finish(self) -> None:
        """Unscales and checks the gradients, and updates the scale, once; also inside the block."""
        if self._state not in (_State.OPEN, _State.DELAYED):
            return
        captures = capturing(self.loss.device)
        if self._is_captured and not captures:
            raise RuntimeError(
                "A CUDA graph has captured a block of amp.scale_loss with delay_unscale=True, but "
                "not the last block of the step: nothing would check the gradients of replays. "
                "Capture the last block, too, without delay_unscale."
            )
        self._state = _State.DONE
        if not self.prepared_optimizers:
            return
        try:
            with without_overrides():
                self._unscale()
            if captures:
                for prepared in self.prepared_optimizers:
                    prepared.keep_captured()
        except BaseException:
            self._restore_grads()
            raise
        finally:
            for prepared in self.prepared_optimizers:
                prepared.end_pass()
        if not self._delay_overflow_check:
            self._notify()

    def _unscale_unchecked(self) -> None:
        with without_overrides():
            if self.scaled:
                self._unscale_apart(grads_of(self.prepared_optimizers))
            for prepared in self.prepared_optimizers:
                prepared.stash.give_back()

    def _leave_unchecked(self) -> None:
        trained = [prepared.trained_params() for prepared in self.prepared_optimizers]
        # A wrapper may hold scaled gradients, which it averages with those of the next block.
        if not any(map(wrappers.is_unfinished, trained)):
            self._unscale_unchecked()
            self._leave_unscaled()
        self._state = _State.DELAYED

    def _leave_unscaled(self) -> None:
        """Records that what is left of its gradients is unscaled, or another's to unscale."""
        self._scale = 1.0
        self.scaled = False

    def _unscale(self) -> None:
        scaler = self.scaler
        if scaler.dynamic and not scaler.awaiting_update:
            scaler.found_inf.zero_()
        if not scaler.is_identity:
            unscale_grads(self.prepared_optimizers, scaler, self._scale)
            self.scaled = False  # so that a failure from here on removes no gradients
        adds = False
        flagged: list[PreparedOptimizer] = []
        for prepared in self.prepared_optimizers:
            adds |= prepared.stash.give_back()
            # A replay of a graph tells nobody whose overflow it is.
            if prepared in self._named or self._is_captured:
                flagged.append(prepared)
            elif scaler.dynamic:
                prepared.add_overflow_of_others(scaler.found_inf.clone(), [])
        if adds:
            for prepared in flagged:
                prepared.check_left_grads()
        if scaler.dynamic:
            self._update_scales([prepared.overflow for prepared in flagged])
        if not self._delay_overflow_check:
            self.updates = scaler.end_pass()

    def _update_scales(self, flags: Iterable[OverflowFlag]) -> None:
        """Updates the scales of earlier passes that it has checked, and soon its own."""
        self.scaler.await_update(flags)
        for scaler in self._scalers_of(self.prepared_optimizers):
            if scaler is not self.scaler:
                scaler.follow(self.scaler.found_inf, counts=True)

    def _scalers_of(self, optimizers: Iterable[PreparedOptimizer]) -> Collection[Scaler]:
        """Returns the scales of the passes whose gradients it checks for optimizers."""
        scalers: dict[Scaler, None] = {}
        for prepared in optimizers:
            begun: BackwardPass | None = self
            while begun is not None:
                scalers[begun.scaler] = None
                begun = begun._earlier.get(prepared)
        return scalers

    def _abort(self) -> None:
        """Drops the gradients of an open pass, but for those that it has added in place."""
        self._state = _State.FAILED
        self._end_loans(failed=True)
        if self.adds_in_place:
            self._unscale_unchecked()
        else:
            self._restore_grads()
        for prepared in self.prepared_optimizers:
            prepared.end_pass(self._earlier.get(prepared))
        self._notify()

    def _restore_grads(self) -> None:
        """Drops the gradients of a pass that failed, and returns those from before."""
        for prepared in self.prepared_optimizers:
            if self.scaled and prepared.unfinished_pass is self:  # else it has not lost its own
                remove_grads(prepared.trained_params())
        for prepared in self.prepared_optimizers:
            prepared.stash.give_back()

    def _notify(self) -> None:
        """Reports updates of the scale, or that the pass has failed."""
        self.session.report(self)
        for prepared in self.prepared_optimizers:
            for listener in [*prepared.listeners]:  # which may remove itself
                listener(self, prepared)
