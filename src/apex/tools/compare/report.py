"""A comparison as one self-contained HTML page: verdicts, two tables with bars, two charts."""

from __future__ import annotations

from apex.tools.compare.charts import charts, round_values
from apex.tools.compare.results import Comparison
from apex.tools.compare.table import tables


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
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        tables=tables(comparison),
        charts=charts(comparison),
        round_values=round_values,
    )
