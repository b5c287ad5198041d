"""A comparison as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apex.debug.rendering.formatting import aligned
from apex.tools.results import Comparison, Result
from apex.tools.rows import Column, Row, footnote, rows, visible_columns
from apex.tools.wrapping import WIDTH, wrapped


def comparison_text(comparison: Comparison, *, width: int | None = None, wide: bool = False) -> str:
    """Returns the table, failures, notes and the recommendation.

    Args:
        comparison: What to show.
        width: Columns of the terminal; ``None`` if there is none.
        wide: Whether to show every column of the table, whatever the width.
    """
    line = min(width or WIDTH, WIDTH)
    found = comparison.recommendation
    reasons = [wrapped(reason, "    ", first="  - ", width=line) for reason in found.reasons]
    parts = [
        wrapped(
            f"{comparison.target}: {comparison.steps} steps on {comparison.machine}", width=line
        ),
        text_table(comparison, width=width, wide=wide),
        "\n".join(
            wrapped(f"{result.name}: {error}", width=line)
            for result in comparison.failed
            for error in result.errors
        ),
        "\n".join(wrapped(note, width=line) for note in comparison.notes),
        "\n".join([wrapped(found.text, width=line), *reasons]),
    ]
    return "\n\n".join(part for part in parts if part)


def text_table(comparison: Comparison, *, width: int | None = None, wide: bool = False) -> str:
    """Returns the table with its legend; empty columns and skipped levels are omitted.

    Below ``WIDTH`` columns, or if the table does not fit, only the compact columns are shown,
    unless ``wide``.
    """
    cells = rows(comparison)
    columns = visible_columns(cells)
    body = _body(cells, columns)
    narrow = width is not None and width < max(WIDTH, *map(len, body)) and not wide
    if narrow:
        columns = {name: column for name, column in columns.items() if column.is_compact}
        body = _body(cells, columns)
    rule = "-" * max(map(len, body))
    legend = [f"{each.heading}: {each.meaning}" for each in columns.values() if each.meaning]
    more = "--wide shows all columns." if narrow else ""
    below = [
        wrapped(text, width=min(width or WIDTH, WIDTH))
        for text in (footnote(comparison), "; ".join(legend), more)
        if text
    ]
    return "\n".join([body[0], rule, *body[1:], rule, *below])


def _body(cells: Sequence[tuple[Result, Row]], columns: Mapping[str, Column]) -> list[str]:
    """Returns the heading and the rows, aligned."""
    lines = [[each.heading for each in columns.values()]]
    lines += [[row[name] for name in columns] for _, row in cells]
    table = aligned(lines, [each.is_left for each in columns.values()])
    return ["  ".join(line).rstrip() for line in table]
