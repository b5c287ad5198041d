"""The comparison as table cells, for the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from apex._core import dtypes
from apex.debug.rendering.formatting import place, short
from apex.tools.results import Comparison, Result
from apex.tools.training import end_loss
from apex.tools.variants import BASELINE

NOTHING = "-"


Row = dict[str, str]
"""One variant's cells, by the names of the columns."""


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        heading: Its heading.
        meaning: What it shows, unless the heading says so.
        is_compact: Whether a narrow terminal shows it.
        is_left: Whether a terminal shows it left-aligned.
    """

    heading: str
    meaning: str = ""
    is_compact: bool = False
    is_left: bool = False


COLUMNS = {
    "level": Column("level", is_compact=True, is_left=True),
    "compute": Column("compute", is_left=True),
    "time": Column("ms / step", is_compact=True),
    "speed": Column(
        "speed", "median over the rounds of fp32's time divided by the level's", is_compact=True
    ),
    "memory": Column(
        "memory",
        "peak, by CUDA's statistics or the CPU allocator's events; elsewhere stored and saved "
        "bytes",
        is_compact=True,
    ),
    "stored": Column("bytes / param", "weights, masters and optimizer state between steps"),
    "peak": Column("peak / param", "that peak in bytes per parameter, activations included"),
    "kept": Column("saved", "bytes that autograd saves for backward, not counting weights"),
    "loss": Column("final loss", "mean over the last steps", is_compact=True),
    "evaluation": Column("evaluate"),
    "distance": Column(
        "from fp32",
        "relative distance of the weights from fp32's after the same number of steps",
    ),
    "skipped": Column("skipped", "steps that overflowed"),
    "frozen": Column("frozen", "weights whose last update was lost to rounding"),
    "underflow": Column(
        "zero grads", "gradients that are zero here but not in fp32, from the same weights"
    ),
    "first": Column(
        "first beyond eps",
        "first module whose output differs from fp32 by more than its dtype's eps",
        is_left=True,
    ),
    "verdict": Column("verdict", is_compact=True, is_left=True),
}


def rows(comparison: Comparison) -> list[tuple[Result, Row]]:
    """Returns every variant, but for those that were skipped, with its cells, formatted."""
    return [(r, _row(r, comparison)) for r in comparison.results if not r.skipped]


def visible_columns(cells: Sequence[tuple[Result, Row]]) -> dict[str, Column]:
    """Returns the columns in which any variant has a value, by name."""
    return {
        name: column
        for name, column in COLUMNS.items()
        if any(row[name] != NOTHING for _, row in cells)
    }


def footnote(comparison: Comparison) -> str:
    """Returns the meaning of the asterisk; empty if no variant has one."""
    results = comparison.results
    steps = [len(r.training.losses) for r in results if r.emulated and r.training is not None]
    if not steps:
        return ""
    return (
        f"* emulated: this machine does not compute in it natively. Trained for only "
        f"{max(steps)} steps; compare its loss with fp32 after the same number of steps."
    )


def _row(result: Result, comparison: Comparison) -> Row:
    timing, speed, memory = result.timing, comparison.speed(result), result.memory
    record, probe, is_baseline = result.training, result.probe, result.name == BASELINE
    verdicts = {verdict.level: verdict.word for verdict in comparison.recommendation.verdicts}
    row = {
        **dict.fromkeys(COLUMNS, NOTHING),
        "level": result.name,
        "compute": "failed",
        "speed": NOTHING if speed is None else f"{speed.median:.2f}x",
        "memory": megabytes(memory) if memory else NOTHING,
        "verdict": verdicts.get(result.name, NOTHING),
    }
    if timing is not None:
        row["time"] = three_digits(timing.median)
    if record is not None:
        seen = None if probe is None else probe.compute_dtype
        dtype = short(seen or dtypes.name(result.variant.dtype))
        loss, far, peak = end_loss(record.losses), record.distance, record.peak_bytes
        row |= {
            "compute": f"{dtype} *" if result.emulated else dtype,
            "stored": f"{record.stored.per_param:.1f}",
            "peak": NOTHING if peak is None else f"{peak / max(record.stored.params, 1):.1f}",
            "loss": f"{loss:.4g}" if math.isfinite(loss) else "diverged",
            "evaluation": NOTHING if record.evaluation is None else f"{record.evaluation:.4g}",
            "distance": NOTHING if far is None else _percent(far.weights),
            "skipped": f"{len(record.skipped)} of {len(record.losses)}",
            "frozen": _percent(record.frozen[-1][1]) if record.frozen else NOTHING,
        }
    if probe is not None:
        first = probe.first_divergence
        row |= {
            "kept": megabytes(probe.activation_bytes),
            "underflow": NOTHING if is_baseline else _percent(probe.underflow),
            "first": NOTHING if is_baseline else "none" if first is None else place(first.name),
        }
    return row


def three_digits(value: float) -> str:
    """Returns three digits of a time, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(count: int) -> str:
    """Returns bytes as megabytes, or as kilobytes below 0.1 MB."""
    value = count / 1e6
    if value < 0.1:
        return f"{count / 1e3:.1f} kB"
    return f"{value:.0f} MB" if value >= 100 else f"{value:.1f} MB"


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "inf"
    if share == 0:
        return "0 %"
    if share < 1e-4:
        return "<0.01 %"
    return f"{share * 100:.3g} %" if share < 0.1 else f"{share * 100:.0f} %"
