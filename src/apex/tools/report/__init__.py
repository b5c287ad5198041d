"""A comparison as one self-contained HTML page with inline SVG."""

from __future__ import annotations

from apex.debug.rendering.files import render
from apex.tools.report.curves import charts
from apex.tools.results import Comparison
from apex.tools.rows import footnote, megabytes, rows, three_digits, visible_columns


def report(comparison: Comparison) -> str:
    """Returns the page as HTML; the same comparison gives the same page."""
    levels = {result.name for result in comparison.results}
    reasons = comparison.recommendation.reasons
    cells = rows(comparison)
    return render(
        "apex.tools.report",
        "report.html.jinja",
        comparison=comparison,
        # Those that rule levels out are among the verdicts.
        reasons=[r for r in reasons if not levels.issuperset(r.partition(": ")[0].split(", "))],
        verdicts=_verdicts(comparison),
        charts=charts(comparison),
        columns=visible_columns(cells),
        rows=cells,
        footnote=footnote(comparison),
        megabytes=megabytes,
        three_digits=three_digits,
    )


def _verdicts(comparison: Comparison) -> list[tuple[list[str], str, str]]:
    """Returns levels, word and reason of each verdict; levels ruled out alike share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in comparison.recommendation.verdicts:
        found.setdefault((verdict.word, verdict.why), []).append(verdict.level)
    return [(levels, word, why) for (word, why), levels in found.items()]
