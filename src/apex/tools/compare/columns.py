"""The columns of the two tables of a comparison, which the help also explains."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column: its heading, its meaning, and whether its cells are left-aligned."""

    heading: str
    meaning: str
    is_left: bool = False


_LEVEL = Column("level", "O0 to O5 of amp, and torch's own ways", True)

TABLES = {
    "Time and memory": {
        "level": _LEVEL,
        "time": Column(
            "ms / step", "median step time; the levels' steps alternate; not measured if emulated"
        ),
        "speed": Column("speed", "fp32 step time / this level's step time, median over rounds"),
        "memory": Column("memory", "peak on CUDA; elsewhere bytes stored and saved for backward"),
        "stored": Column("bytes / param", "weights, masters and optimizer state between steps"),
        "saved": Column("saved", "bytes that autograd saves for backward, not counting weights"),
        "verdict": Column("verdict", "use, ties, usable, unclear, no, skipped, baseline", True),
    },
    "Training": {
        "level": _LEVEL,
        "loss": Column("final loss", "mean over the last steps"),
        "apart": Column(
            "loss - fp32, %", "mean difference on the same batches, and its standard error"
        ),
        "evaluation": Column("evaluate", "what the target's evaluate returned"),
        "skipped": Column("skipped", "steps that overflowed"),
        "frozen": Column("frozen", "largest share of weights whose update was lost to rounding"),
    },
}


def legend() -> str:
    """Returns a line for each column, for the help text."""
    meanings = {}
    for table in TABLES.values():
        for column in table.values():
            meanings[column.heading] = column.meaning
    width = max(map(len, meanings))
    return "\n".join(f"  {heading:{width}}  {text}" for heading, text in meanings.items())
