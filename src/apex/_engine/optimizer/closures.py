"""A step with a closure, which computes the gradients itself, perhaps several times."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apex._engine import masters
from apex._engine.autocast.region import UncastBlock
from apex._engine.mistakes import inspect_step
from apex._torch.dynamo import untraced, untraced_frame

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer

Closure = Callable[[], Any]


class _SkipStep(BaseException):
    """Unwinds ``optimizer.step(closure)`` when the closure's gradients overflowed.

    Not an ``Exception``: an optimizer that catches exceptions from its closure would step anyway.
    """


@untraced_frame
def step(prepared: PreparedOptimizer, run: Callable[[Closure], Any], closure: Closure) -> Any:
    """Runs the optimizer's own step ``run``, whose evaluations have op casts as in training.

    Reverts all of it if any evaluation overflows.
    """
    prepared.begin_step(closure=True)
    off = UncastBlock()
    try:
        off.__enter__()
        prepared.note_skipped(False)
        evaluate = _evaluation(prepared, closure, off)
        if prepared.session is None or not prepared.session.can_skip:
            return run(evaluate)
        return _run_unless_overflow(prepared, run, evaluate)
    finally:  # also if the step failed partway
        prepared.end_step(())
        off.__exit__(None, None, None)


@untraced_frame
def _run_unless_overflow(
    prepared: PreparedOptimizer, run: Callable[[Closure], Any], evaluate: Closure
) -> Any:
    before = _snapshot(prepared)
    losses: list[Any] = []

    @untraced_frame
    def evaluate_or_skip() -> Any:
        losses.append(evaluate())
        if prepared.overflowed():
            raise _SkipStep
        return losses[-1]

    try:
        return run(evaluate_or_skip)
    except BaseException as error:
        _restore(prepared, before)
        if not isinstance(error, _SkipStep):
            raise
    prepared.skipped = True
    return losses[0]


@untraced_frame
def _evaluation(prepared: PreparedOptimizer, closure: Closure, off: UncastBlock) -> Closure:
    """Returns ``closure`` with the model updated before it and op casts as in training."""

    @untraced_frame
    def evaluate() -> Any:
        masters.round_into_model(prepared.pairs)
        off.__exit__(None, None, None)
        try:
            loss = closure()
        finally:
            off.__enter__()
        prepared.settle_gradients()
        inspect_step(prepared, in_closure=True)
        for pair in prepared.pairs:
            pair.mark_written()
        return loss

    return evaluate


_Snapshot = tuple[list[Tensor], dict[Any, Any]]
"""What an optimizer steps, and its state."""


@untraced
def _snapshot(prepared: PreparedOptimizer) -> _Snapshot:
    # An optimizer that evaluates several times in one step (LBFGS) must have its values and state
    # restored if a later evaluation overflows, so both are kept until the step ends.
    params = [param.detach().clone() for param in prepared.params()]
    return params, {p: copy.deepcopy(kept) for p, kept in prepared.optimizer.state.items()}


@untraced
@torch.no_grad()
def _restore(prepared: PreparedOptimizer, before: _Snapshot) -> None:
    params, state = before
    for param, value in zip(prepared.params(), params, strict=True):
        param.copy_(value)
    prepared.optimizer.state.clear()
    prepared.optimizer.state.update(state)
