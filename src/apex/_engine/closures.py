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
    from apex._engine.binding import Binding

Closure = Callable[[], Any]


class _SkipStep(BaseException):
    """Unwinds ``optimizer.step(closure)`` when the closure's gradients overflowed.

    Not an ``Exception``: an optimizer that catches exceptions from its closure would step anyway.
    """


@untraced_frame
def step(binding: Binding, run: Callable[[Closure], Any], closure: Closure) -> Any:
    """Runs the optimizer's own step ``run``, whose evaluations have op casts as in training.

    Reverts all of it if any evaluation overflows.
    """
    binding.begin_step(closure=True)
    off = UncastBlock()
    try:
        off.__enter__()
        binding.note_skipped(False)
        evaluate = _evaluation(binding, closure, off)
        if binding.owner is None or not binding.owner.can_skip:
            return run(evaluate)
        return _run_unless_overflow(binding, run, evaluate)
    finally:  # also if the step failed partway
        binding.end_step(())
        off.__exit__(None, None, None)


@untraced_frame
def _run_unless_overflow(binding: Binding, run: Callable[[Closure], Any], evaluate: Closure) -> Any:
    before = _snapshot(binding)
    losses: list[Any] = []

    @untraced_frame
    def evaluate_or_skip() -> Any:
        losses.append(evaluate())
        if binding.overflowed():
            raise _SkipStep
        return losses[-1]

    try:
        return run(evaluate_or_skip)
    except BaseException as error:
        _restore(binding, before)
        if not isinstance(error, _SkipStep):
            raise
    binding.skipped = True
    return losses[0]


@untraced_frame
def _evaluation(binding: Binding, closure: Closure, off: UncastBlock) -> Closure:
    """Returns ``closure`` with the model updated before it and op casts as in training."""

    @untraced_frame
    def evaluate() -> Any:
        masters.round_into_model(binding.pairs)
        off.__exit__(None, None, None)
        try:
            loss = closure()
        finally:
            off.__enter__()
        binding.settle_gradients()
        inspect_step(binding, in_closure=True)
        for pair in binding.pairs:
            pair.mark_written()
        return loss

    return evaluate


_Snapshot = tuple[list[Tensor], dict[Any, Any]]
"""What an optimizer steps, and its state."""


@untraced
def _snapshot(binding: Binding) -> _Snapshot:
    # An optimizer that evaluates several times in one step (LBFGS) must have its values and state
    # restored if a later evaluation overflows, so both are kept until the step ends.
    params = [param.detach().clone() for param in binding.params()]
    return params, {p: copy.deepcopy(kept) for p, kept in binding.optimizer.state.items()}


@untraced
@torch.no_grad()
def _restore(binding: Binding, before: _Snapshot) -> None:
    params, state = before
    for param, value in zip(binding.params(), params, strict=True):
        param.copy_(value)
    binding.optimizer.state.clear()
    binding.optimizer.state.update(state)
