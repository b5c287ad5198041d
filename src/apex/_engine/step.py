"""One step of a prepared optimizer, skipped if a gradient overflowed."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from apex._engine import block_step, masters
from apex._engine.autocast.region import UncastBlock
from apex._engine.block_step import BlockStep, fused_kind
from apex._engine.mistakes import inspect_step
from apex._torch.dynamo import is_compiling_here, untraced, untraced_frame
from apex._torch.overrides import without_overrides

if TYPE_CHECKING:
    from apex._engine.binding import Binding

Run = Callable[..., Any]
"""The optimizer's own step; takes a closure or nothing."""

Closure = Callable[[], Any]

_OVERRIDE_NOTHING = frozenset({nn.Parameter, masters.Master})
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
    if binding.stepping:  # an optimizer inside another: the step has begun
        return run() if closure is None else run(closure)
    masters.drop_unsent_bits(binding.pairs)
    if closure is not None:
        return _step_with_closure(binding, run, closure)
    binding.settle(takes=False)
    inspect_step(binding)
    off = UncastBlock()
    blocks: BlockStep | None = None
    try:
        _begin(binding, off)
        if binding.pairs:
            compiled = is_compiling_here()
            blocks = block_step.begin(binding, compiled=compiled)
            if not compiled and _sees_only_parameters(binding):
                run = functools.partial(_run_without_overrides, run)
        if binding.checked:
            return _run_unless_overflow(binding, run)
        binding.begin_step(skipped=False)
        return run()
    finally:  # also if the step failed partway
        _end(binding, off, blocks)


def _sees_only_parameters(binding: Binding) -> bool:
    """Returns whether an optimizer of torch or apex steps masters and plain parameters only."""
    module = type(binding.optimizer).__module__
    known = module.startswith(("torch.optim.", "apex.optimizers."))
    return known and _OVERRIDE_NOTHING.issuperset(map(type, binding.params()))


def _run_without_overrides(run: Run) -> Any:
    with without_overrides():
        return run()


@untraced
def _begin(binding: Binding, off: UncastBlock) -> None:
    """Has masters count as written until the end: torch's fused kernels do not count."""
    binding.stepping = True
    for pair in binding.pairs:
        pair.mark_written()
    off.__enter__()


@untraced
def _end(binding: Binding, off: UncastBlock, blocks: BlockStep | None = None) -> None:
    """Rounds the masters into the model, drops their gradients and turns casts back on."""
    if blocks is not None:
        blocks.end()
    left = () if blocks is None else blocks.rounded
    masters.round_into_model([p for p in binding.pairs if id(p) not in left or p.master_written])
    binding.end_step()
    binding.stepping = False
    off.__exit__(None, None, None)


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
    flag = binding.found_inf
    if flag is None or not skips_in_kernel(optimizer) or _spans_devices(binding, flag):
        skipped = binding.overflowed()
        binding.begin_step(skipped=skipped)
        return None if skipped else run()
    binding.begin_step(skipped=flag)
    optimizer.found_inf = flag
    try:
        return run()
    finally:
        del optimizer.found_inf


def _spans_devices(binding: Binding, flag: Tensor) -> bool:
    # torch's fused optimizers copy the flag to CPU parameters without synchronizing (torch 2.13).
    return flag.device.type != "cpu" and any(p.device.type == "cpu" for p in binding.params())


@untraced_frame
def _step_with_closure(binding: Binding, run: Run, closure: Closure) -> Any:
    binding.read_masters()
    off = UncastBlock()
    try:
        _begin(binding, off)
        evaluate = _evaluation(binding, closure, off)
        binding.begin_step(skipped=False)
        if binding.owner is not None and binding.owner.can_skip:
            return _run_or_restore(binding, run, evaluate)
        return run(evaluate)
    finally:
        _end(binding, off)


@untraced_frame
def _run_or_restore(binding: Binding, run: Run, closure: Closure) -> Any:
    """Runs the step, and reverts all of it if any evaluation of ``closure`` overflows."""
    before = _snapshot(binding)
    losses: list[Any] = []
    skipped: list[bool] = []

    @untraced_frame
    def evaluate() -> Any:
        losses.append(closure())
        if binding.overflowed():
            skipped.append(True)
            raise _SkipStep
        return losses[-1]

    try:
        result = run(evaluate)
    except BaseException as error:
        _restore_snapshot(binding, before)
        if not isinstance(error, _SkipStep):
            raise
    if not skipped:
        return result
    _restore_snapshot(binding, before)  # also if the optimizer caught _SkipStep
    binding.skipped = True
    return losses[0]


@untraced_frame
def _evaluation(binding: Binding, closure: Closure, off: UncastBlock) -> Callable[[], Any]:
    """Returns ``closure`` with the model updated before it and op casts as in training."""

    @untraced_frame
    def evaluate() -> Any:
        masters.round_into_model(binding.pairs)
        with _suspended(off):
            loss = closure()
        binding.settle()
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
def _restore_snapshot(binding: Binding, before: _Snapshot) -> None:
    params, state = before
    for param, value in zip(binding.params(), params, strict=True):
        param.copy_(value)
    binding.optimizer.state.clear()
    binding.optimizer.state.update(state)


@contextmanager
def _suspended(block: UncastBlock) -> Iterator[None]:
    """Exits ``block`` for the duration of the context and re-enters it at the end."""
    block.__exit__(None, None, None)
    try:
        yield
    finally:
        block.__enter__()
