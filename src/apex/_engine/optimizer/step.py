"""One step of a prepared optimizer without a closure, skipped if a gradient overflowed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from apex._engine import masters
from apex._engine.autocast.ambient import UncastBlock
from apex._engine.mistakes import inspect_step
from apex._engine.optimizer import block_step
from apex._engine.optimizer.fused import skips_in_kernel
from apex._torch.dynamo import is_compiling_here, untraced_frame
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer

Run = Callable[[], Any]

_OVERRIDE_NOTHING = frozenset({nn.Parameter, masters.Master, masters.LazyMaster})
"""Classes of parameters that change nothing about torch's functions."""


@untraced_frame
def step(prepared: PreparedOptimizer, run: Run) -> Any:
    """Runs the optimizer's own step ``run`` unless a gradient overflowed; then updates the model.

    Returns its result; ``None`` for a skipped step.
    """
    inspect_step(prepared)
    prepared.begin_step()
    off, blocks = UncastBlock(), None
    try:
        off.__enter__()
        compiled = is_compiling_here()
        blocks = block_step.begin(prepared, compiled=compiled)
        if prepared.pairs and not compiled and _sees_only_parameters(prepared):
            run = functools.partial(_run_without_overrides, run)
        return _run_unless_overflow(prepared, run)
    finally:  # also if the step failed partway
        prepared.end_step(() if blocks is None else blocks.end())
        off.__exit__(None, None, None)


@untraced_frame
def _run_unless_overflow(prepared: PreparedOptimizer, run: Run) -> Any:
    flag = prepared.found_inf if prepared.checked else None
    if flag is None:
        prepared.note_skipped(False)
        return run()
    optimizer: Any = prepared.optimizer
    if not skips_in_kernel(optimizer, flag):
        skipped = prepared.overflowed()
        prepared.note_skipped(skipped)
        return None if skipped else run()
    prepared.note_skipped(flag)
    optimizer.found_inf = flag
    try:
        return run()
    finally:
        del optimizer.found_inf


def _sees_only_parameters(prepared: PreparedOptimizer) -> bool:
    """Returns whether an optimizer of torch or apex steps masters and plain parameters only."""
    module = type(prepared.optimizer).__module__
    known = module.startswith(("torch.optim.", "apex.optimizers."))
    return known and _OVERRIDE_NOTHING.issuperset(map(type, prepared.params()))


def _run_without_overrides(run: Run) -> Any:
    with without_overrides():
        return run()
