"""Records of what happened in a step, for reports and tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Iteration(NamedTuple):
    """What the passes before one step of an optimizer have in common.

    Attributes:
        optimizer: Tells optimizers apart.
        number: Changes with every step, and when the gradients are cleared.
    """

    optimizer: int
    number: int


@dataclass(frozen=True)
class ScaleUpdate:
    """One update of a loss scale, as read on the host.

    Attributes:
        loss_id: Which scaler of the session.
        loss_scale: The scale after the update (multiplier).
        overflow: Whether a gradient of this pass held inf or NaN.
        optimizers: How many optimizers the pass was for; on overflow only those that no earlier
            pass of this loss makes skip the same step.
        skipped_in_row: Overflows in a row, this one included; 0 when clean.
    """

    loss_id: int
    loss_scale: float
    overflow: bool
    optimizers: int
    skipped_in_row: int


class PassEnd(NamedTuple):
    """The end of one ``scale_loss`` block, as the host knows it then.

    Attributes:
        loss_id: Which scaler of the session.
        updates: Scale updates that have arrived by now; on a device those of earlier passes.
        bindings: The optimizers that the pass was for.
        failed: Whether an exception ended it.
    """

    loss_id: int
    updates: Sequence[ScaleUpdate]
    bindings: Sequence[object]
    failed: bool
