"""The whole page: what to do and why, the plots, the table."""

from __future__ import annotations

from html import escape
from importlib import resources

from apex.tools.report.bars import memory_figure, time_figure
from apex.tools.report.curves import curve_figures
from apex.tools.report.table import table
from apex.tools.results import Comparison
from apex.tools.variants import BASELINE


def report(comparison: Comparison) -> str:
    """Returns the page as HTML; the same comparison gives the same page."""
    bars = [figure for figure in (time_figure(comparison), memory_figure(comparison)) if figure]
    body = [
        _header(comparison),
        _advice(comparison),
        f'<div class="pair">{"".join(bars)}</div>' if bars else "",
        *curve_figures(comparison),
        table(comparison),
        "<footer>Written by <code>apex compare</code>. The same seed gives the same curves; only "
        "the times vary.</footer>",
    ]
    page = _asset("page.html")
    for name, text in {
        "title": f"apex compare: {escape(comparison.target)}",
        "style": _asset("style.css"),
        "script": _asset("hover.js"),
        "body": "\n".join(part for part in body if part),
    }.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def chip(name: str) -> str:
    """Returns a variant's name with its colour."""
    return f'<b class="chip {name}">{name}</b>'


def _header(comparison: Comparison) -> str:
    headline, colon, rest = comparison.recommendation.text.partition(": ")
    level = comparison.recommendation.level
    if level != BASELINE:
        headline = escape(headline).replace(escape(level), f'<b class="{level}">{level}</b>', 1)
    else:
        headline = escape(headline)
    rest = rest[:1].upper() + rest[1:]
    return (
        f'<header><p class="eyebrow">apex compare <code>{escape(comparison.target)}</code></p>'
        f"<h1>{headline}</h1>"
        + (f'<p class="lead">{escape(rest)}</p>' if colon else "")
        + f'<p class="machine">{comparison.steps} steps from the same weights on the same batches, '
        f"seed {comparison.seed}. {escape(comparison.machine)}.</p></header>"
    )


def _advice(comparison: Comparison) -> str:
    refused = [r for r in comparison.recommendation.reasons if _names_a_level(r, comparison)]
    reasons = [r for r in comparison.recommendation.reasons if r not in refused]
    parts = [
        _list("Why", [escape(reason) for reason in reasons], ""),
        _list("Why not the others", [_refusal(reason) for reason in refused], ""),
        _list("To know", [escape(note) for note in comparison.notes], "notes"),
    ]
    return f'<section class="advice">{"".join(parts)}</section>' if any(parts) else ""


def _names_a_level(reason: str, comparison: Comparison) -> bool:
    names = reason.partition(": ")[0].split(", ")
    return {result.name for result in comparison.results}.issuperset(names)


def _refusal(reason: str) -> str:
    names, _, why = reason.partition(": ")
    return f"{' '.join(map(chip, names.split(', ')))} {escape(why)}"


def _list(title: str, items: list[str], kind: str) -> str:
    if not items:
        return ""
    lines = "".join(f"<li>{item}</li>" for item in items)
    return f'<div class="{kind}"><h2>{title}</h2><ul>{lines}</ul></div>'


def _asset(name: str) -> str:
    return (resources.files("apex.tools.report") / "page" / name).read_text(encoding="utf-8")
