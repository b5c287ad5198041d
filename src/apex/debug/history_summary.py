"""A history in a few lines: scales, skips and gradient norms of each loss."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apex.debug.history import Pass


def summary(passes: Sequence[Pass]) -> str:
    """Returns a few lines for each loss, however many passes there are."""
    if not passes:
        return "No backward pass recorded yet."
    losses = sorted({item.loss_id for item in passes})
    lines = []
    for loss_id in losses:
        own = [item for item in passes if item.loss_id == loss_id]
        name = f"Loss {loss_id}: " if len(losses) > 1 else ""
        lines += [name + _title(own), *(f"  {line}" for line in _details(own))]
    return "\n".join(lines)


def _title(passes: Sequence[Pass]) -> str:
    skipped = sum(item.overflow for item in passes)
    share = f" ({100 * skipped / len(passes):.2g} %)" if skipped else ""
    plural = "es" * (len(passes) != 1)
    return (
        f"{len(passes)} backward pass{plural} ({passes[0].index} to {passes[-1].index}), "
        f"{skipped} skipped{share}"
    )


def _details(passes: Sequence[Pass]) -> Iterator[str]:
    scales = [item.loss_scale for item in passes]
    span = f", from {min(scales):g} to {max(scales):g}" if min(scales) < max(scales) else ""
    yield f"loss scale     {scales[-1]:g} now{span}"
    skips = [item.index for item in passes if item.overflow]
    if skips:
        runs = itertools.groupby(item.overflow for item in passes)
        rows = (len(list(run)) for skipped, run in runs if skipped)
        yield f"skips          the last in pass {skips[-1]}, at most {max(rows)} in a row"
    yield from _norms(passes)


def _norms(passes: Sequence[Pass]) -> Iterator[str]:
    known = [(item.grad_norm, item.index) for item in passes if item.grad_norm is not None]
    norms = [(norm, index) for norm, index in known if math.isfinite(norm)]
    if not norms:
        return
    values = [norm for norm, _ in norms]
    largest, index = max(norms)
    bad = len(known) - len(norms)
    yield (
        f"gradient norm  {values[-1]:.3g} last, median {statistics.median(values):.3g}, "
        f"largest {largest:.3g} in pass {index}" + (f", {bad} not finite" if bad else "")
    )
