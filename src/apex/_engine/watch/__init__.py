"""What is said of mistakes in training loops, and of what 16 bits lose.

Sessions have a :class:`Watch` as their observer. With a plain one, amp computes the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._core.user_files import warn_at_caller
from apex._engine.backward import BackwardPass
from apex._engine.conversion.state import ModelState
from apex._engine.observer import NOTHING, Observer
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._engine.scaler import Readback
from apex._engine.session import Session
from apex._engine.watch.losses import Losses
from apex._engine.watch.lost_writes import WeightWatch
from apex._engine.watch.mistakes import (
    INSPECTED,
    BlockInspection,
    Mistake,
    Origin,
    add_hooks,
    origins_of,
    some_of,
)
from apex._engine.watch.writes import Writes, log_lost
from apex._engine.wrappers.ddp import wrappers
from apex._torch import dtensor, ranks
from apex._torch.autograd import backward_id
from apex._torch.copies import capturing
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.dynamo import is_jit_tracing, untraced
from apex._torch.modules import params_in


class Watch(Observer):
    """Warns of mistakes in the loop of one session, and of what its 16-bit models lose."""

    def __init__(self) -> None:
        """Starts without models and mistakes."""
        self._warned: set[Mistake] = set()
        # ``scale_loss`` blocks that are still to be inspected.
        self._blocks_left = INSPECTED
        # By block, as blocks of other optimizers may be open at the same time.
        self._inspections = weakref.WeakKeyDictionary[BackwardPass, BlockInspection]()
        # Whether a backward pass has reached observed parameters.
        self._has_plain_pass = False
        # Whether a step has found a gradient.
        self._has_trained = False
        # Flags on their way to the host: whether a mistake was made.
        self._answers = Readback[Mistake]()
        # Comparisons of weights with their masters, by optimizer, until its next step. The keys
        # stay, as another thread may iterate.
        self._weights = weakref.WeakKeyDictionary[PreparedOptimizer, WeightWatch | None]()
        self._hooks = ExitStack()  # removes those of parameters
        self._losses = Losses()
        self._writes = weakref.WeakKeyDictionary[ModelState, Writes]()

    # -- warnings ----------------------------------------------------------------------------

    def warn(self, mistake: Mistake | None) -> None:
        """Warns of a mistake, if there is one, at the user's line; once per session."""
        if mistake is not None and mistake not in self._warned:
            self._warned.add(mistake)
            warn_at_caller(mistake.value)

    def _warn_of_arrived(self) -> None:
        for mistake, (flag,) in self._answers.poll():
            if flag:
                self.warn(mistake)

    # -- passes without a block --------------------------------------------------------------

    def optimizer_prepared(self, prepared: PreparedOptimizer) -> None:
        """Observes whether a pass reaches fp16 parameters before any ``scale_loss`` block."""
        self._weights[prepared] = None
        session = prepared.session
        if session.has_scale and session.policy.low_precision is torch.float16:
            add_hooks(self._hooks, some_of(prepared.trained_params()), self._reach)
            prepared.until_plain.callback(self.stop_observing)

    @untraced
    def _reach(self, _: Tensor) -> None:
        self._has_plain_pass = True

    def stop_observing(self) -> None:
        """Removes the hooks; idempotent."""
        self._has_plain_pass = False
        self._hooks.close()

    # -- blocks ------------------------------------------------------------------------------

    def block_begins(self, block: BackwardPass, scaled_loss: Tensor) -> None:
        """Begins to inspect the block, if it is one of the first; checks a static scale's loss."""
        if not block.scaler.dynamic:
            self._losses.check(block.scaler.loss_id, block.loss)
        if not self._blocks_left:
            return
        self._blocks_left -= 1
        self.stop_observing()
        lenders, _ = block.borrowable()
        for prepared in (*block.prepared_optimizers, *lenders):
            observer = prepared.session.observer  # of another session, perhaps
            if isinstance(observer, Watch):
                observer.stop_observing()
        if not block.scaled:
            return
        for prepared in block.prepared_optimizers:
            self.warn(_find_mistake(prepared))
            if _has_uncleared(prepared):
                self._answers.send(Mistake.UNCLEARED_OVERFLOW, _overflow(prepared))
        self._warn_of_arrived()
        may_change = any(map(_averages, block.prepared_optimizers))
        self._inspections[block] = BlockInspection(
            self.warn, block, scaled_loss, may_change=may_change
        )

    def pass_ends(self, block: BackwardPass) -> None:
        """Inspects gradients before they are unscaled."""
        inspection = self._inspections.get(block)
        if inspection is not None:
            inspection.end()

    def block_ends(self, block: BackwardPass) -> None:
        """Warns of what was found in the block."""
        inspection = self._inspections.pop(block, None)
        if block.failed:
            if block.adds_in_place:
                self.warn(Mistake.FAILED_AFTER_DELAYED)
        elif inspection is not None:
            self.warn(inspection.found)

    # -- steps -------------------------------------------------------------------------------

    @untraced
    def step_begins(self, prepared: PreparedOptimizer) -> None:
        """Warns of writes that torch does not count, which the step overwrites, and GradScalers.

        Compares weights at the first steps, and later at one in 32.
        """
        if prepared.asked_by_grad_scaler:
            self._judge_grad_scaler(prepared.session)
        turn, phase = divmod(prepared.steps, INSPECTED)
        is_first = turn == 0
        if not (prepared.pairs and (is_first or phase < 2)):
            return
        watch = self._weights[prepared]
        self._weights[prepared] = None
        if watch is not None:
            is_lost = watch.lost()
            if is_lost is not None:
                self._answers.send(Mistake.LOST_WRITE, is_lost)
        if is_first or phase == 0:
            self._weights[prepared] = WeightWatch(prepared, phase if is_first else turn)
        self._warn_of_arrived()

    def _judge_grad_scaler(self, session: Session) -> None:
        if session.has_scale and self._blocks_left < INSPECTED:
            self.warn(Mistake.GRAD_SCALER)
        else:  # the script does not need one
            self._warned.add(Mistake.NO_SCALE_LOSS)

    @untraced
    def gradients_used(self, prepared: PreparedOptimizer) -> None:
        """Warns of gradients that are not the step's, and of missing ones."""
        if not self._blocks_left:
            return
        if self._has_plain_pass:
            self.stop_observing()
            self.warn(Mistake.NO_SCALE_LOSS)
        self.warn(_find_mistake(prepared))
        if not self._has_trained:
            self._has_trained = prepared.has_grads() or not prepared.params()
            # Not the first step: scripts call it once for a scheduler, or before a part trains.
            is_second = prepared.steps == 1 and not prepared.stepping
            if is_second and not self._has_trained:
                self.warn(Mistake.STEP_BEFORE_BACKWARD)

    def other_step(self, params: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Warns if scaled gradients were stepped, or 16-bit weights of a model."""
        if Origin.OTHER in origins_of(params):
            self.warn(Mistake.FORGOTTEN_OPTIMIZER)
        if weights:
            self.warn(Mistake.UNPREPARED_OPTIMIZER)

    def masters_read(self, prepared: PreparedOptimizer) -> None:
        """Warns if masters' gradients are read before the model's gradients are unscaled."""
        opened = prepared.unfinished_pass
        # While a pass runs, hooks may ask for the masters, for instance to step them.
        if opened is None or not opened.scaled or backward_id() != -1:
            return
        if prepared.pairs:
            self.warn(Mistake.CLIPPED_INSIDE)

    # -- uses of a model ---------------------------------------------------------------------

    def model_used(self, state: ModelState, reader: FrameType | None) -> None:
        """Compares weights with their masters.

        Also logs the fix of torch's error about ``lerp_`` from 16-bit weights to a copy.
        """
        for weights in self._weights.values():
            if weights is not None:
                weights.look()
        if reader is not None and state.was_copied:
            self._writes_of(state).check_average(reader)

    def _writes_of(self, state: ModelState) -> Writes:
        writes = self._writes.get(state)
        if writes is None:
            writes = self._writes[state] = Writes()
        return writes

    def forward(
        self,
        model: nn.Module,
        state: ModelState,
        forward: Callable[..., Any],
        given: tree.Call,
        cast: tree.Call,
    ) -> AbstractContextManager[None]:
        """Watches what a forward pass of a 16-bit model loses."""
        if state.plan.casts_down:
            writes = self._writes_of(state)
            if writes.left > 0 and not (is_jit_tracing() or _captures(model)):
                return writes.watch(model, state, forward, given, cast)
        return NOTHING

    def loading(self, state: ModelState) -> None:
        """Starts anew: tensors that a load writes are neither averages nor counters."""
        self._writes_of(state).note_load()

    def converted(self, model: nn.Module, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Logs the buffers whose order rounding loses."""
        log_lost(model, before)


def _captures(model: nn.Module) -> bool:
    """Returns whether a CUDA graph captures the forward, and would repeat what observes it."""
    params = params_in(model)
    return bool(params) and capturing(params[0].device)


def _averages(prepared: PreparedOptimizer) -> bool:
    """Returns whether scaled gradients may be averaged over ranks by other code than a wrapper."""
    if getattr(prepared.optimizer, "synchronize", None) is not None:
        return True  # Horovod's, BytePS's
    return ranks.world_size() > 1 and not wrappers.of(prepared.trained_params())


def _has_uncleared(prepared: PreparedOptimizer) -> bool:
    """Returns whether gradients of a skipped step are left, as far as is known without waiting."""
    overflow = prepared.overflow
    if overflow.pending is not None or prepared.unfinished_pass is not None:
        return False  # they are of blocks since
    return prepared.has_grads() and bool(overflow.was_skipped_on_host())


@suspend_modes()  # a trace would list these operators as the script's
def _overflow(prepared: PreparedOptimizer) -> Tensor:
    """Returns whether a gradient holds inf or NaN, as [1]."""
    params = prepared.trained_params()
    gradients = [param.grad for param in params if param.grad is not None]
    values = dtensor.dense_values(gradients)  # this rank's: no question communicates
    filled = [value for value in values if value.numel()]
    norm = nn.utils.get_total_norm(filled, float("inf"))
    return norm.isfinite().logical_not().float().reshape(1)


def _find_mistake(prepared: PreparedOptimizer) -> Mistake | None:
    """Returns the mistake that gradients from before a block, or a step, show."""
    origins = origins_of(some_of(prepared.trained_params()))
    return Mistake.FORGOTTEN_OPTIMIZER if Origin.OTHER in origins else None
