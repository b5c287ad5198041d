"""A prepared optimizer's step, with a closure or without, skipped if a gradient overflowed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from apex._core.param_groups import params_of
from apex._engine import masters
from apex._engine.autocast.ambient import UncastBlock
from apex._engine.mistakes import inspect_step
from apex._engine.optimizer import block_step
from apex._torch.dynamo import is_compiling_here, untraced, untraced_frame
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer

Run = Callable[[], Any]
Closure = Callable[[], Any]

_OVERRIDE_NOTHING = frozenset({nn.Parameter, masters.Master, masters.LazyMaster})
"""Classes of parameters that change nothing about torch's functions."""


_FUSED_CLASSES = (SGD, Adagrad, AdamW, Adam)


@untraced_frame
def run_step(prepared: PreparedOptimizer, run: Run) -> Any:
    """Runs the optimizer's own step ``run`` unless a gradient overflowed; then updates the model.

    Returns its result; ``None`` for a skipped step. After an exception, gradients and overflow are
    there for another try.
    """
    session = prepared.session
    if session is not None and session.mistakes.blocks_left:
        inspect_step(prepared)
    prepared.begin_step()
    blocks: block_step.BlockStep | None = None
    overrides: AbstractContextManager[Any] = nullcontext()
    failed = True
    try:
        with UncastBlock():
            if prepared.pairs:
                compiled = is_compiling_here()
                if prepared.masters.lazy:
                    if not compiled and _reads_gradients_in_kernels(prepared.optimizer):
                        blocks = block_step.begin(prepared)
                    if blocks is None:
                        masters.move_grads_to_masters(prepared.pairs)
                if not compiled and _sees_only_parameters(prepared):
                    overrides = without_overrides()
            with overrides:
                result = _run_unless_overflow(prepared, run)
        failed = False
        return result
    finally:
        prepared.end_step(() if blocks is None else blocks.end(), failed=failed)


@untraced_frame
def _run_unless_overflow(prepared: PreparedOptimizer, run: Run) -> Any:
    overflow = prepared.overflow
    optimizer: Any = prepared.optimizer
    flag = overflow.pending
    if flag is None:
        result = run()
        overflow.consume(skipped=False)
        return result
    if not _skips_in_kernel(optimizer, flag):
        skipped = prepared.must_skip()
        result = None if skipped else run()
        overflow.consume(skipped)
        return result
    # A GradScaler around amp, of which amp warns, has set its own.
    scalers_flag = vars(optimizer).get("found_inf")
    if scalers_flag is None:
        optimizer.found_inf = flag
    else:
        optimizer.found_inf = torch.maximum(flag, scalers_flag.to(flag.device))
    try:
        result = run()
    finally:
        if scalers_flag is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = scalers_flag
    overflow.consume(skipped=flag)
    return result


def _sees_only_parameters(prepared: PreparedOptimizer) -> bool:
    """Returns whether an optimizer of torch or apex steps masters and plain parameters only."""
    module = type(prepared.optimizer).__module__
    known = module.startswith(("torch.optim.", "apex.optimizers."))
    return known and _OVERRIDE_NOTHING.issuperset(map(type, prepared.params()))


# -- fused kernels -------------------------------------------------------------------------------


def _fused_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns torch's class whose fused kernel steps every group; ``None`` if there is none."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return None
    for fused_class in _FUSED_CLASSES:
        if issubclass(type(optimizer), fused_class):
            return fused_class
    return None


def _reads_gradients_in_kernels(optimizer: Optimizer) -> bool:
    """Returns whether only torch's fused kernels read the values of gradients in its step.

    Optimizers of other classes declare it by ``gradients_in_kernels`` in the class itself, as a
    subclass may read them elsewhere.
    """
    own: Any = optimizer.__class__  # not the class that amp generates
    return own is _fused_class(optimizer) or bool(vars(own).get("gradients_in_kernels"))


@untraced
def _skips_in_kernel(optimizer: Optimizer, found_inf: Tensor) -> bool:
    """Returns whether the optimizer's step reads ``found_inf`` on the device and skips by itself.

    torch's fused optimizers do if every group is fused; so do others that declare
    ``_step_supports_amp_scaling``, but not by a step that takes a ``grad_scaler``, which it asks.
    """
    # torch's fused optimizers copy it to CPU parameters without synchronizing (torch 2.13).
    flag_on_cpu = found_inf.device.type == "cpu"
    if not flag_on_cpu and any(param.device.type == "cpu" for param in params_of(optimizer)):
        return False
    # A copied or unpickled torch optimizer loses the declaration but keeps its fused kernels.
    fused_class = _fused_class(optimizer)
    if fused_class is not None:
        return fused_class is not SGD or not _starts_momentum(optimizer)
    declared = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = declared and all(group.get("fused", True) for group in optimizer.param_groups)
    own: Any = optimizer.__class__
    return fused and "grad_scaler" not in inspect.signature(own.step).parameters


def _starts_momentum(optimizer: Optimizer) -> bool:
    # torch's fused SGD kernel leaves the momentum uninitialized if it skips the first step, and the
    # next step uses it (torch 2.13). So the host decides whether a group's first step is skipped.
    state = optimizer.state
    return any(
        group["momentum"] != 0
        and not any("momentum_buffer" in state[p] for p in group["params"] if p in state)
        for group in optimizer.param_groups
    )


# -- with a closure, which computes the gradients itself, perhaps several times ------------------


class _SkipStep(BaseException):
    """Unwinds ``optimizer.step(closure)`` when the closure's gradients overflowed.

    Not an ``Exception``: an optimizer that catches exceptions from its closure would step anyway.
    """


@untraced_frame
def run_step_with_closure(
    prepared: PreparedOptimizer, run: Callable[[Closure], Any], closure: Closure
) -> Any:
    """Runs the optimizer's own step ``run``, whose evaluations have op casts as in training.

    Reverts all of it if any evaluation overflows.
    """
    prepared.begin_step(has_closure=True)
    uncast = UncastBlock()
    failed = True
    try:
        with uncast:
            evaluate = _evaluation(prepared, closure, uncast)
            if prepared.session is not None and prepared.session.can_skip:
                result = _run_unless_evaluation_overflows(prepared, run, evaluate)
            else:
                result = run(evaluate)
                prepared.overflow.consume(skipped=False)
        failed = False
        return result
    finally:
        prepared.end_step(failed=failed)


@untraced_frame
def _run_unless_evaluation_overflows(
    prepared: PreparedOptimizer, run: Callable[[Closure], Any], evaluate: Closure
) -> Any:
    before = _snapshot(prepared)
    losses: list[Any] = []

    @untraced_frame
    def evaluate_or_skip() -> Any:
        losses.append(evaluate())
        if prepared.must_skip():
            raise _SkipStep
        return losses[-1]

    try:
        result = run(evaluate_or_skip)
    except BaseException as error:
        _restore(prepared, before)
        if not isinstance(error, _SkipStep):
            raise
        prepared.overflow.consume(skipped=True)
        return losses[0]
    prepared.overflow.consume(skipped=False)
    return result


@untraced_frame
def _evaluation(prepared: PreparedOptimizer, closure: Closure, uncast: UncastBlock) -> Closure:
    """Returns ``closure`` with the model updated before it and op casts as in training."""

    @untraced_frame
    def evaluate() -> Any:
        masters.update_model_from_masters(prepared.pairs)
        uncast.__exit__(None, None, None)
        try:
            loss = closure()
        finally:
            uncast.__enter__()
        prepared.update_masters_with_grads()
        inspect_step(prepared, in_closure=True)
        masters.mark_written(prepared.pairs)
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
