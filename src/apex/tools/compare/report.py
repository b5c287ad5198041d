"""A comparison as one self-contained HTML page: verdicts, two tables with bars, two charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apex.tools.compare.charts import charts
from apex.tools.compare.columns import COLUMNS
from apex.tools.compare.results import Comparison, Result
from apex.tools.compare.table import NOTHING, Row, rows

GAIN_COLUMNS = ("level", "time", "speed", "memory", "stored", "saved", "verdict")
TRAINING_COLUMNS = ("level", "loss", "apart", "evaluation", "skipped", "frozen")


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
        charts=charts(comparison),
    )


def _table(names: Sequence[str], cells: list[tuple[Result, Row]]) -> dict[str, Any]:
    shown = [name for name in names if any(row[name] != NOTHING for _, row in cells)]
    return {"columns": {name: COLUMNS[name] for name in shown}, "rows": cells}
