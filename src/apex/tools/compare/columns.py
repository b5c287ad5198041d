"""The columns of a comparison's table, which the help explains."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column: its heading, what it shows, whether the compact table has it, and how it stands."""

    heading: str
    meaning: str
    is_compact: bool = False
    is_left: bool = False


COLUMNS = {
    "level": Column("level", "O0 to O5 of amp, and torch's own ways", True, True),
    "time": Column("ms / step", "median step time; the levels' steps alternate", True),
    "speed": Column("speed", "fp32 step time / this level's step time, median over rounds", True),
    "memory": Column("memory", "peak on CUDA; elsewhere bytes stored and saved for backward", True),
    "stored": Column("bytes / param", "weights, masters and optimizer state between steps"),
    "saved": Column("saved", "bytes that autograd saves for backward, not counting weights"),
    "loss": Column("final loss", "mean over the last steps", True),
    "apart": Column(
        "loss - fp32, %", "mean difference on the same batches, and its standard error"
    ),
    "evaluation": Column("evaluate", "what the target's evaluate returned"),
    "skipped": Column("skipped", "steps that overflowed"),
    "frozen": Column("frozen", "largest share of weights whose update was lost to rounding"),
    "verdict": Column("verdict", "use, ties, usable, unclear, no, skipped", True, True),
}


def legend() -> str:
    """Returns a line for each column, for the help text."""
    width = max(len(column.heading) for column in COLUMNS.values())
    return "\n".join(f"  {c.heading:{width}}  {c.meaning}" for c in COLUMNS.values())
