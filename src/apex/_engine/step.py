"""One step of a prepared optimizer without a closure, skipped if a gradient overflowed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from apex._engine import block_step, masters
from apex._engine.autocast.region import UncastBlock
from apex._engine.fused import skips_in_kernel
from apex._engine.mistakes import inspect_step
from apex._torch.dynamo import is_compiling_here, untraced_frame
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._engine.binding import Binding

Run = Callable[[], Any]

_OVERRIDE_NOTHING = frozenset({nn.Parameter, masters.Master, masters.LazyMaster})
"""Classes of parameters that change nothing about torch's functions."""


@untraced_frame
def step(binding: Binding, run: Run) -> Any:
    """Runs the optimizer's own step ``run`` unless a gradient overflowed; then updates the model.

    Returns its result; ``None`` for a skipped step.
    """
    inspect_step(binding)
    binding.begin_step()
    off, blocks = UncastBlock(), None
    try:
        off.__enter__()
        compiled = is_compiling_here()
        blocks = block_step.begin(binding, compiled=compiled)
        if binding.pairs and not compiled and _sees_only_parameters(binding):
            run = functools.partial(_run_without_overrides, run)
        return _run_unless_overflow(binding, run)
    finally:  # also if the step failed partway
        binding.end_step(() if blocks is None else blocks.end())
        off.__exit__(None, None, None)


@untraced_frame
def _run_unless_overflow(binding: Binding, run: Run) -> Any:
    flag = binding.found_inf if binding.checked else None
    if flag is None:
        binding.note_skipped(False)
        return run()
    optimizer: Any = binding.optimizer
    if not skips_in_kernel(optimizer, flag):
        skipped = binding.overflowed()
        binding.note_skipped(skipped)
        return None if skipped else run()
    binding.note_skipped(flag)
    optimizer.found_inf = flag
    try:
        return run()
    finally:
        del optimizer.found_inf


def _sees_only_parameters(binding: Binding) -> bool:
    """Returns whether an optimizer of torch or apex steps masters and plain parameters only."""
    module = type(binding.optimizer).__module__
    known = module.startswith(("torch.optim.", "apex.optimizers."))
    return known and _OVERRIDE_NOTHING.issuperset(map(type, binding.params()))


def _run_without_overrides(run: Run) -> Any:
    with without_overrides():
        return run()
