"""The table of all figures, and what failed."""

from __future__ import annotations

from html import escape

from apex.tools.results import Comparison, Result
from apex.tools.rows import HEADINGS, MEANINGS, Row, footnote, rows, shown


def table(comparison: Comparison) -> str:
    """Returns every variant's figures; on a narrow screen each row becomes a card."""
    cells = rows(comparison)
    names = [name for name in shown(cells) if name != "spread"]
    head = "".join(
        f'<th scope="col" title="{escape(MEANINGS.get(name, ""))}">{getattr(HEADINGS, name)}</th>'
        for name in names
    )
    body = "".join(
        _row(result, row, names[1:]) for result, row in zip(comparison.results, cells, strict=True)
    )
    return (
        "<section><h2>All figures</h2><div class='scroll'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{_legend(names, footnote(comparison))}</section>"
    )


def _row(result: Result, row: Row, names: list[str]) -> str:
    errors = "".join(f'<small class="error">{escape(error)}</small>' for error in result.errors)
    head = (
        f'<th scope="row"><b class="chip {result.name}">{result.name}</b>'
        f"<small>{escape(result.variant.meaning)}</small>{errors}</th>"
    )
    cells = "".join(
        f'<td class="{name}" data-label="{getattr(HEADINGS, name)}">'
        f"{escape(getattr(row, name))}</td>"
        for name in names
    )
    kind = ' class="emulated"' if result.emulated else ""
    return f"<tr{kind}>{head}{cells}</tr>"


def _legend(names: list[str], star: str) -> str:
    terms = "".join(
        f"<div><dt>{getattr(HEADINGS, name)}</dt><dd>{MEANINGS[name]}</dd></div>"
        for name in names
        if name in MEANINGS
    )
    note = f'<p class="note">{escape(star)}</p>' if star else ""
    return f'{note}<dl class="note">{terms}</dl>'
