"""A comparison as tables, and as text for the terminal."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from apex.debug.common import aligned, percent
from apex.tools.compare.columns import TABLES, Column
from apex.tools.compare.results import Comparison, Result, Training
from apex.tools.compare.soundness import excess
from apex.tools.compare.training import end_loss
from apex.tools.compare.verdict import size

WIDTH = 100


class Table(NamedTuple):
    """A table: its columns by name, and each level's result and cells."""

    title: str
    columns: Mapping[str, Column]
    rows: list[tuple[Result, dict[str, str]]]


def tables(comparison: Comparison) -> list[Table]:
    """Returns the tables without the levels that were skipped and without empty columns."""
    rows = []
    filled: set[str] = set()
    verdicts = comparison.recommendation.verdicts
    for result, verdict in zip(comparison.results, verdicts, strict=True):
        if not result.skipped:
            cells = _cells(result, comparison)
            cells["verdict"] = verdict.word
            rows.append((result, cells))
            filled.update(cells)
    shown = []
    for title, columns in TABLES.items():
        columns_shown = {name: column for name, column in columns.items() if name in filled}
        shown.append(Table(title, columns_shown, rows))
    return shown


def comparison_text(comparison: Comparison) -> str:
    """Returns the tables, the notes, the recommendation and a line for each verdict."""
    recommendation = comparison.recommendation
    title = f"{comparison.target}: {comparison.steps} steps on {comparison.machine}"
    parts = [wrapped(title)]
    parts += [table_text(table) for table in tables(comparison)]
    parts += map(wrapped, comparison.notes)
    levels_by_verdict = defaultdict(list)
    for verdict in recommendation.verdicts:
        if verdict.why:
            text = f"{verdict.word}, {verdict.why}."
            levels_by_verdict[text].append(verdict.level)
    conclusion = [wrapped(f"{recommendation.text} {recommendation.quality}")]
    for text, levels in levels_by_verdict.items():
        line = f"  {', '.join(levels)}: {text}"
        conclusion.append(wrapped(line, "    "))
    parts.append("\n".join(conclusion))
    return "\n\n".join(parts)


def table_text(table: Table) -> str:
    """Returns a table with a rule below its headings."""
    columns = table.columns.values()
    headings = [column.heading for column in columns]
    is_left = [column.is_left for column in columns]
    rows = [[cells[name] for name in table.columns] for _, cells in table.rows]
    lines = aligned([headings, *rows], is_left)
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def wrapped(text: str, indent: str = "") -> str:
    """Returns a paragraph in lines of at most ``WIDTH`` characters, indented after the first."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _cells(result: Result, comparison: Comparison) -> dict[str, str]:
    """Returns a level's cells by the names of the columns; for any other name, a dash."""
    cells: dict[str, str] = defaultdict(lambda: "—")
    cells["level"] = result.name
    if result.emulated:
        cells["time"] = "emulated"
    if result.times:
        cells["time"] = f"{result.milliseconds:.4g}"
    speed = comparison.speed(result)
    if speed is not None:
        cells["speed"] = f"{speed.median:.2f}x"
    if result.training is not None:
        cells["memory"] = size(result.memory)
        cells.update(_training_cells(result.training, comparison.baseline.training))
    return cells


def _training_cells(record: Training, base: Training | None) -> dict[str, str]:
    cells = {
        "loss": f"{end_loss(record.losses):.4g}",
        "saved": size(record.saved_bytes),
        "stored": f"{record.stored.per_param:.1f}",
        "skipped": f"{record.skipped} of {len(record.losses)}",
    }
    if base is not None and base is not record:
        difference = excess(record.losses, base.losses)
        if difference is not None:
            error = 100 * difference.share_error
            cells["apart"] = f"{100 * difference.share:+.2g} ± {error:.1g}"
    if record.evaluation is not None:
        cells["evaluation"] = f"{record.evaluation:.4g}"
    if record.frozen is not None:
        cells["frozen"] = percent(record.frozen)
    return cells
