"""An explanation as one self-contained page: the model's tree coloured by dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from apex.debug.explanation import Explanation, within
from apex.debug.records import CAST, OpRow
from apex.debug.rendering import formatting
from apex.debug.rendering.pages import render

_DTYPES = ("fp16", "bf16", "fp32", "fp64")


def page(explanation: Explanation) -> str:
    """Returns the whole page; it loads nothing and runs no script."""
    ops = explanation.ops
    outside = [row for row in ops if not row.inside]
    found = {_tone(row.computed_in) for row in ops}

    def shares(rows: Iterable[OpRow]) -> list[tuple[str, float]]:
        """Returns the share of all time by dtype, for a bar."""
        sums: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            sums[_tone(row.computed_in)] += explanation.time_share(row)
        return sorted(sums.items())

    return render(
        "apex.debug.rendering",
        "explanation.html.jinja",
        explanation=explanation,
        lines=list(formatting.lines(explanation)),
        findings=formatting.findings(explanation),
        formatting=formatting,
        tone=_tone,
        cast_op=CAST,
        legend=[name for name in _DTYPES if name in found],
        parts=formatting.parts(explanation.modules),
        inside=lambda name: [row for row in ops if row.inside and within(row.module, name)],
        outside=outside,
        outside_casts=sum(cast.count for row in outside for cast in row.casts),
        shares=shares,
    )


def _tone(dtype: str) -> str:
    """Returns the CSS class that colours a dtype."""
    return formatting.short(dtype) if dtype else "none"
