"""The whole page: the recommendation and its reasons, the plots, the table."""

from __future__ import annotations

from apex.debug.rendering.pages import render
from apex.tools.report.bars import bar_figures
from apex.tools.report.curves import curve_figures
from apex.tools.results import Comparison
from apex.tools.rows import COLUMNS, footnote, rows, visible_columns
from apex.tools.variants import BASELINE


def report(comparison: Comparison) -> str:
    """Returns the page as HTML; the same comparison gives the same page."""
    reasons = comparison.recommendation.reasons
    trained = [
        (result, row)
        for result, row in zip(comparison.results, rows(comparison), strict=True)
        if not result.skipped
    ]
    return render(
        "apex.tools.report",
        "report.html.jinja",
        comparison=comparison,
        headline=_headline(comparison),
        reasons=[reason for reason in reasons if not _levels_of(reason, comparison)],
        verdicts=_verdicts(comparison),
        bar_figures=bar_figures(comparison),
        curve_figures=curve_figures(comparison),
        columns={name: COLUMNS[name] for name in visible_columns([row for _, row in trained])},
        rows=trained,
        footnote=footnote(comparison),
    )


def _headline(comparison: Comparison) -> dict[str, str]:
    """Returns the recommendation as a headline, split at the level, and the sentence after it."""
    headline, _, rest = comparison.recommendation.text.partition(": ")
    level = comparison.recommendation.level
    split = headline.partition(level) if level not in (None, BASELINE) else (headline, "", "")
    before, named, after = split
    return {
        "before": before,
        "level": named,
        "after": after,
        "lead": rest[:1].upper() + rest[1:],
    }


def _verdicts(comparison: Comparison) -> list[tuple[list[str], str, str]]:
    """Returns levels, word and reason of each verdict; levels ruled out alike share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in comparison.recommendation.verdicts:
        found.setdefault((verdict.word, verdict.why), []).append(verdict.level)
    return [(levels, word, why) for (word, why), levels in found.items()]


def _levels_of(reason: str, comparison: Comparison) -> list[str]:
    """Returns the levels that a reason rules out; empty if it supports the choice."""
    names = reason.partition(": ")[0].split(", ")
    return names if {result.name for result in comparison.results}.issuperset(names) else []
