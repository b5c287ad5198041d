"""A comparison as tables, and as text for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from apex.debug.common import aligned, percent
from apex.tools.compare.columns import TABLES, Column
from apex.tools.compare.results import Comparison, Result
from apex.tools.compare.soundness import excess
from apex.tools.compare.training import end_loss
from apex.tools.compare.verdict import size

NOTHING = "—"

WIDTH = 100


class Table(NamedTuple):
    """A table: its columns by name, and each level with its cells."""

    title: str
    columns: Mapping[str, Column]
    rows: list[tuple[Result, dict[str, str]]]


def tables(comparison: Comparison) -> list[Table]:
    """Returns the tables without the levels that were skipped and without empty columns."""
    rows = []
    shown: set[str] = set()
    for result in comparison.results:
        if not result.skipped:
            cells = _cells(result, comparison)
            rows.append((result, cells))
            shown.update(name for name, cell in cells.items() if cell != NOTHING)
    found = []
    for title, columns in TABLES.items():
        filled = {name: column for name, column in columns.items() if name in shown}
        found.append(Table(title, filled, rows))
    return found


def comparison_text(comparison: Comparison) -> str:
    """Returns the tables, the notes, the recommendation and a line for each verdict."""
    advice = comparison.recommendation
    levels: dict[str, list[str]] = {}
    for verdict in advice.verdicts:
        if verdict.why:
            levels.setdefault(f"{verdict.word}, {verdict.why}.", []).append(verdict.level)
    verdicts = []
    for text, names in levels.items():
        verdicts.append(wrapped(f"  {', '.join(names)}: {text}", "    "))
    parts = [
        wrapped(f"{comparison.target}: {comparison.steps} steps on {comparison.machine}"),
        *map(table_text, tables(comparison)),
        "\n".join(map(wrapped, comparison.notes)),
        "\n".join([wrapped(advice.text), *verdicts]),
    ]
    return "\n\n".join(filter(None, parts))


def table_text(table: Table) -> str:
    """Returns a table with a rule below its headings."""
    lines = [[column.heading for column in table.columns.values()]]
    for _, cells in table.rows:
        lines.append([cells[name] for name in table.columns])
    columns = aligned(lines, [column.is_left for column in table.columns.values()])
    heading, *body = ["  ".join(line).rstrip() for line in columns]
    return "\n".join([heading, "-" * len(heading), *body])


def wrapped(text: str, indent: str = "") -> str:
    """Returns a paragraph in lines of at most ``WIDTH`` characters; ``indent`` is of the others."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _cells(result: Result, comparison: Comparison) -> dict[str, str]:
    """Returns a level's cells by the names of the columns."""
    cells: dict[str, str] = defaultdict(lambda: NOTHING)
    cells["level"] = result.name
    if result.times:
        cells["time"] = f"{result.milliseconds:.4g}"
    speed = comparison.speed(result)
    if speed is not None:
        cells["speed"] = f"{speed.median:.2f}x"
    for verdict in comparison.recommendation.verdicts:
        if verdict.level == result.name:
            cells["verdict"] = verdict.word
    record = result.training
    if record is None:
        return cells
    loss = end_loss(record.losses)
    cells["memory"] = size(result.memory)
    cells["saved"] = size(record.saved_bytes)
    cells["stored"] = f"{record.stored.per_param:.1f}"
    cells["loss"] = f"{loss:.4g}" if math.isfinite(loss) else "diverged"
    cells["apart"] = _apart(result, comparison)
    cells["skipped"] = f"{len(record.skipped)} of {len(record.losses)}"
    if record.evaluation is not None:
        cells["evaluation"] = f"{record.evaluation:.4g}"
    if record.frozen is not None:
        cells["frozen"] = percent(record.frozen)
    return cells


def _apart(result: Result, comparison: Comparison) -> str:
    """Returns a level's mean paired difference and its standard error, such as "+0.2 ± 0.1"."""
    record = result.training
    base = comparison.baseline.training
    if record is None or base is None or result is comparison.baseline:
        return NOTHING
    difference = excess(record.losses, base.losses)
    if difference is None:
        return NOTHING
    return f"{100 * difference.share:+.2g} ± {100 * difference.share_error:.1g}"
