"""A comparison as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from apex.tools.results import Comparison
from apex.tools.rows import HEADINGS, MEANINGS, footnote, rows, visible_columns
from apex.tools.wrapping import wrapped

LEFT = ("level", "compute", "first", "verdict")
"""Left-aligned columns."""


def comparison_text(comparison: Comparison) -> str:
    """Returns the table, failures, notes and the recommendation."""
    parts = [
        f"{comparison.target}: {comparison.steps} steps on {comparison.machine}",
        text_table(comparison),
        "\n".join(
            wrapped(f"{result.name}: {error}")
            for result in comparison.failed
            for error in result.errors
        ),
        "\n".join(map(wrapped, comparison.notes)),
        advice(comparison),
    ]
    return "\n\n".join(part for part in parts if part)


def text_table(comparison: Comparison) -> str:
    """Returns the table with its legend; empty columns and skipped levels are omitted."""
    skipped = {result.name for result in comparison.results if result.skipped}
    cells = [row for row in rows(comparison) if row.level not in skipped]
    names = visible_columns(cells)
    lines = [[getattr(row, name) for name in names] for row in (HEADINGS, *cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [_aligned(line, names, widths) for line in lines]
    rule = "-" * max(map(len, body))
    legend = "; ".join(f"{getattr(HEADINGS, n)}: {MEANINGS[n]}" for n in names if n in MEANINGS)
    below = [wrapped(text) for text in (footnote(comparison), legend) if text]
    return "\n".join([body[0], rule, *body[1:], rule, *below])


def advice(comparison: Comparison) -> str:
    """Returns the recommendation and its reasons."""
    found = comparison.recommendation
    reasons = [wrapped(reason, "    ", first="  - ") for reason in found.reasons]
    return "\n".join([wrapped(found.text), *reasons])


def _aligned(cells: Sequence[str], names: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if name in LEFT else cell.rjust(width)
        for cell, name, width in zip(cells, names, widths, strict=True)
    ).rstrip()
