"""A comparison as one self-contained HTML page: verdicts, two tables with bars, two charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apex.tools.compare.charts import charts
from apex.tools.compare.columns import COLUMNS
from apex.tools.compare.results import Comparison, Result
from apex.tools.compare.table import NOTHING, Row, footnote, rows

GAIN_COLUMNS = ("level", "time", "speed", "memory", "stored", "saved", "verdict")
TRAINING_COLUMNS = ("level", "loss", "apart", "evaluation", "distance", "skipped", "frozen")


def report(comparison: Comparison) -> str:
    """Returns the page as HTML; the same comparison gives the same page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("apex.tools.compare", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cells = rows(comparison)
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        tables=[
            ("Time and memory", _table(GAIN_COLUMNS, cells)),
            ("Training", _table(TRAINING_COLUMNS, cells)),
        ],
        bars=_bars([result for result, _ in cells]),
        charts=charts(comparison),
        footnote=footnote(comparison),
    )


def _table(names: Sequence[str], cells: list[tuple[Result, Row]]) -> dict[str, Any]:
    shown = [name for name in names if any(row[name] != NOTHING for _, row in cells)]
    return {"columns": {name: COLUMNS[name] for name in shown}, "rows": cells}


def _bars(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Returns the length of the bar, from 0 to 100, of each level and column that has one."""
    lengths: dict[tuple[str, str], float] = {}
    for column in ("time", "memory", "stored", "saved"):
        values = {result.name: _measure(result, column) for result in results}
        longest = max(values.values(), default=0.0)
        for level, value in values.items():
            if value:
                lengths[level, column] = 100 * value / longest
    return lengths


def _measure(result: Result, column: str) -> float:
    """Returns the figure that a bar shows; 0 if there is none."""
    if column == "memory":
        return result.memory
    if column == "time":  # emulated times would shrink the others to nothing
        return 0.0 if result.timing is None or result.emulated else result.timing.median
    if result.training is None:
        return 0.0
    if column == "stored":
        return result.training.stored.per_param
    return result.training.saved_bytes
