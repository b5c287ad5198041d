"""Events of training steps, for reports and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ScaleUpdate(NamedTuple):
    """One update of a loss scale, as read on the host.

    Attributes:
        loss_id: Index of the session's scaler.
        loss_scale: The scale after the update (multiplier).
        overflow: Whether a gradient of this pass held inf or NaN.
        optimizers: Number of optimizers of the pass.
        skipped_in_row: Consecutive overflows, including this one; 0 when clean.
    """

    loss_id: int
    loss_scale: float
    overflow: bool
    optimizers: int
    skipped_in_row: int


class PassEnd(NamedTuple):
    """The end of one ``scale_loss`` block, as known on the host.

    Attributes:
        loss_id: Index of the session's scaler.
        updates: Scale updates that have arrived by now; on a device, those of earlier passes.
        prepared_optimizers: The optimizers of the pass.
        failed: Whether an exception ended it.
    """

    loss_id: int
    updates: Sequence[ScaleUpdate]
    prepared_optimizers: Sequence[object]
    failed: bool
