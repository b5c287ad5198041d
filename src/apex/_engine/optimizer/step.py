"""One step of a bound optimizer, skipped if a gradient overflowed."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from apex._engine import tracked_pair
from apex._engine.autocast.blocks import UncastBlock
from apex._engine.mistakes import inspect_step
from apex._engine.optimizer.one_pass import OnePassStep, fused_kind, one_pass_step
from apex._torch.dynamo import is_compiling_here, untraced, untraced_frame
from apex._torch.overrides import without_overrides

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding

Run = Callable[..., Any]
"""The optimizer's own step; takes a closure or nothing."""

Closure = Callable[[], Any]

_OVERRIDE_NOTHING = frozenset({nn.Parameter, tracked_pair.Master})
"""Classes of parameters that change nothing about torch's functions."""


class _SkipStep(BaseException):
    """Unwinds ``optimizer.step(closure)`` when the closure's gradients overflowed.

    Not an ``Exception``: an optimizer that catches exceptions from its closure would step anyway.
    """


@untraced_frame
def step(binding: Binding, run: Run, closure: Closure | None) -> Any:
    """Runs the optimizer's own step unless a gradient overflowed; then updates the model.

    Args:
        binding: The optimizer's binding.
        run: The optimizer's own step.
        closure: Recomputes the loss, or ``None``.

    Returns:
        The result of the step; ``None`` for a skipped one without a closure.
    """
    if closure is not None:
        return _step_with_closure(binding, run, closure)
    binding.settle(steps=True)
    gradients = binding.gradients
    if not (gradients.used and gradients.overflow.steps):
        _inspect(binding)
    off = UncastBlock()
    one_pass: list[OnePassStep] = []
    try:
        _mark_masters_written(binding)
        off.__enter__()
        if binding.pairs:
            compiled = is_compiling_here()
            _begin_one_pass(binding, one_pass, OnePassStep.begin, compiled=compiled)
            if not compiled and _sees_only_parameters(binding):
                run = functools.partial(_run_without_overrides, run)
        if binding.gradients.overflow.checked:
            return _run_unless_overflow(binding, run)
        binding.gradients.overflow.note_step(skipped=False)
        return run()
    finally:  # also if the step failed partway
        _end(binding, off, one_pass)


def _sees_only_parameters(binding: Binding) -> bool:
    """Returns whether an optimizer of torch or apex steps masters and plain parameters only."""
    module = type(binding.optimizer).__module__
    known = module.startswith(("torch.optim.", "apex.optimizers."))
    return known and _OVERRIDE_NOTHING.issuperset(map(type, binding.params()))


def _run_without_overrides(run: Run) -> Any:
    with without_overrides():
        return run()


@untraced
def _end(binding: Binding, off: UncastBlock, one_pass: Sequence[OnePassStep]) -> None:
    """Rounds the masters into the model and turns casts back on."""
    for each in one_pass:
        each.end()
    if binding.pairs:
        tracked_pair.write_back(binding.pairs, ends_step=True)
    binding.gradients.end_step()
    off.__exit__(None, None, None)


@untraced_frame
def _begin_one_pass(
    binding: Binding,
    one_pass: list[OnePassStep],
    begin: Callable[[OnePassStep], None],
    *,
    compiled: bool,
) -> None:
    """Begins a step in one pass, if gradients are deferred; ``one_pass`` gets it first."""
    step = one_pass_step(binding, compiled=compiled)
    if step is not None:
        one_pass.append(step)
        begin(step)


@untraced
def _inspect(binding: Binding) -> None:
    owner, used = binding.owner, binding.gradients.used
    if owner is not None:
        # Of several optimizers that a block names, one may have no gradient yet.
        stepped = owner.bindings if used else [binding]
        inspect_step(
            owner.mistakes,
            binding.trained,
            lambda: any(each.gradients.has_grads() for each in stepped),
            binding.optimizer.param_groups,
            needs_scale=owner.needs_scale and not used,
        )


@untraced
def _mark_masters_written(binding: Binding) -> None:
    binding.gradients.begin_step()
    for pair in binding.pairs:
        pair.mark_stepped()


def skips_in_kernel(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's step reads ``found_inf`` on the device and skips by itself.

    torch's fused optimizers do if every group is fused; so do others that declare
    ``_step_supports_amp_scaling``, but not by a step that takes a ``grad_scaler``, which it asks.
    """
    # A copied or unpickled torch optimizer loses the declaration but keeps its fused kernels.
    if (kind := fused_kind(optimizer)) is not None:
        return kind is not SGD or not _starts_momentum(optimizer)
    declared = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = declared and all(group.get("fused", True) for group in optimizer.param_groups)
    return fused and not _takes_grad_scaler(type(optimizer))


def _takes_grad_scaler(kind: type[Optimizer]) -> bool:
    """Returns whether the step of an optimizer's own class takes a ``grad_scaler``."""
    own = (each for each in kind.__mro__ if not each.__module__.startswith("apex._engine."))
    step = next(vars(each)["step"] for each in own if "step" in vars(each))
    return "grad_scaler" in inspect.signature(step).parameters


def _starts_momentum(optimizer: Optimizer) -> bool:
    # torch's fused SGD kernel leaves the momentum uninitialized if it skips the first step, and the
    # next step uses it (torch 2.13). So the host decides whether a group's first step is skipped.
    state = optimizer.state
    return any(
        group["momentum"] != 0
        and not any("momentum_buffer" in state[p] for p in group["params"] if p in state)
        for group in optimizer.param_groups
    )


@untraced_frame
def _run_unless_overflow(binding: Binding, run: Run) -> Any:
    optimizer: Any = binding.optimizer
    overflow = binding.gradients.overflow
    if not reads_flag(optimizer, binding):
        skipped = overflowed(binding)
        overflow.note_step(skipped=skipped)
        return None if skipped else run()
    flag = overflow.found_inf
    overflow.note_step(skipped=False if flag is None else flag)
    optimizer.found_inf = flag
    try:
        return run()
    finally:
        del optimizer.found_inf


def reads_flag(optimizer: Optimizer, binding: Binding) -> bool:
    """Returns whether an optimizer of the binding's parameters can be handed its overflow flag."""
    return skips_in_kernel(optimizer) and not _spans_devices(binding)


def _spans_devices(binding: Binding) -> bool:
    # torch's fused optimizers copy the flag to CPU parameters without synchronizing (torch 2.13).
    flag = binding.gradients.overflow.found_inf
    return (
        flag is not None
        and flag.device.type != "cpu"
        and any(param.device.type == "cpu" for param in binding.params())
    )


@untraced
def overflowed(binding: Binding) -> bool:
    """Returns whether a gradient overflowed, so that the next step is skipped."""
    overflow = binding.gradients.overflow
    if not overflow.checked or overflow.found_inf is None:
        return False
    return bool(overflow.found_inf.tolist())  # sync: an optimizer in Python needs the answer


@untraced_frame
def _step_with_closure(binding: Binding, run: Run, closure: Closure) -> Any:
    binding.regroup()
    binding.read_model(steps=True)
    off = UncastBlock()
    one_pass: list[OnePassStep] = []
    try:
        _mark_masters_written(binding)
        off.__enter__()
        evaluate = _evaluation(binding, closure, off, one_pass)
        binding.gradients.overflow.note_step(skipped=False)
        if binding.owner is not None and binding.owner.can_skip:
            return _run_or_restore(binding, run, evaluate)
        return run(evaluate)
    finally:
        _end(binding, off, one_pass)


@untraced_frame
def _run_or_restore(binding: Binding, run: Run, closure: Closure) -> Any:
    """Runs the step, and reverts all of it if any evaluation of ``closure`` overflows."""
    before = _snapshot(binding)
    losses: list[Any] = []
    skipped: list[bool] = []

    @untraced_frame
    def evaluate() -> Any:
        losses.append(closure())
        if overflowed(binding):
            skipped.append(True)
            raise _SkipStep
        return losses[-1]

    try:
        result = run(evaluate)
    except BaseException as error:
        _restore_snapshot(binding, before)
        if not isinstance(error, _SkipStep):
            raise
        binding.gradients.overflow.skipped = True
        return losses[0]
    if skipped:  # the optimizer caught _SkipStep
        _restore_snapshot(binding, before)
        binding.gradients.overflow.skipped = True
        return losses[0]
    return result


@untraced_frame
def _evaluation(
    binding: Binding,
    closure: Closure,
    off: UncastBlock,
    one_pass: list[OnePassStep],
) -> Callable[[], Any]:
    """Returns ``closure`` with the model updated before it and op casts as in training."""

    @untraced_frame
    def evaluate() -> Any:
        for each in one_pass:
            each.end()
        tracked_pair.write_back(binding.pairs, ends_step=True)
        with _suspended(off):
            loss = closure()
        binding.settle(steps=True)
        if not binding.gradients.used and any(p.grad is not None for p in binding.params()):
            _inspect(binding)
        _mark_masters_written(binding)
        _begin_one_pass(binding, one_pass, OnePassStep.arm, compiled=is_compiling_here())
        return loss

    return evaluate


class _Snapshot(NamedTuple):
    """What an optimizer steps, and its state."""

    params: list[Tensor]
    state: dict[Any, Any]


@untraced
def _snapshot(binding: Binding) -> _Snapshot:
    # An optimizer that evaluates several times in one step (LBFGS) must have its values and state
    # restored if a later evaluation overflows, so both are kept until the step ends.
    params = [param.detach().clone() for param in binding.params()]
    state = {param: copy.deepcopy(kept) for param, kept in binding.optimizer.state.items()}
    return _Snapshot(params, state)


@untraced
@torch.no_grad()
def _restore_snapshot(binding: Binding, before: _Snapshot) -> None:
    for param, value in zip(binding.params(), before.params, strict=True):
        param.copy_(value)
    binding.optimizer.state.clear()
    binding.optimizer.state.update(before.state)


@contextmanager
def _suspended(block: UncastBlock) -> Iterator[None]:
    """Exits ``block`` for the duration of the context and re-enters it at the end."""
    block.__exit__(None, None, None)
    try:
        yield
    finally:
        block.__enter__()
