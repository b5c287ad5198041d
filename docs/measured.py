"""Tables of measured figures in the pages: ``python -m docs.measured`` fills in their values.

A comment before a table lists the benchmark and the case of each row::

    <!-- measured
    models: conv net, O4 / autocast
    -->
    | measured | value | quartiles |
    |---|---|---|
    | conv net at O4, time relative to `torch.autocast` | 1.00x | 0.99 to 1.01 |

The values are those of ``benchmarks/results/cpu.json``; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results/cpu.json"

_TABLE = re.compile(
    r"(<!-- measured\n(?P<cases>(?:.*\n)*?)-->\n\| measured .*\n\|[-|]+\n)(?P<rows>(?:\|.*\n)+)"
)


def filled(text: str) -> str:
    """Returns a page with the values of its tables.

    Raises:
        KeyError: For a case that the results lack.
        ValueError: For a table with another number of rows than its comment has.
    """
    results = json.loads(RESULTS.read_text("utf-8"))
    figures = {f"{figure['benchmark']}: {figure['case']}": figure for figure in results["figures"]}

    def table(match: re.Match[str]) -> str:
        rows = []
        cases = match["cases"].splitlines()
        for case, row in zip(cases, match["rows"].splitlines(), strict=True):
            meaning = row.split("|")[1].strip()
            value, quartiles = _cells(figures[case])
            rows.append(f"| {meaning} | {value} | {quartiles} |\n")
        return match[1] + "".join(rows)

    return _TABLE.sub(table, text)


def made_by() -> str:
    """Returns the machine that the figures were measured on."""
    machine = json.loads(RESULTS.read_text("utf-8"))["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def _cells(figure: dict[str, Any]) -> tuple[str, str]:
    value, low, high = (
        "" if figure[key] is None else f"{figure[key]:.{figure['digits']}f}"
        for key in ("value", "low", "high")
    )
    unit = figure["unit"]
    spread = "" if low in ("", high) else f"{low} to {high}"
    return f"{value}{'' if unit == 'x' else ' '}{unit}", spread


if __name__ == "__main__":
    for page in DOCS.glob("**/*.md"):
        text = page.read_text("utf-8")
        if "<!-- measured" in text:
            page.write_text(filled(text), encoding="utf-8")
            print(page)
