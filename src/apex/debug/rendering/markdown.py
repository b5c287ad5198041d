"""An explanation in Markdown: totals, modules and operators as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from apex.debug.explanation import Explanation
from apex.debug.rendering import formatting


def markdown(explanation: Explanation) -> str:
    """Returns the explanation with every row, for an issue or a file."""
    modules = (
        (
            f"`{formatting.place(row.name)}`",
            row.kind,
            formatting.short(row.dtype),
            formatting.percent(row.time_share),
            formatting.amount(row.casts),
            formatting.bits(row.headroom),
        )
        for row in explanation.modules
    )
    ops = (
        (
            row.direction,
            formatting.place(row.module, row.inside),
            f"`{row.op}`",
            formatting.amount(row.calls),
            formatting.types(row),
            formatting.casts(row),
            formatting.percent(explanation.time_share(row)),
            formatting.bits(row.headroom) + (" **inf!**" if row.nonfinite else ""),
            row.decided_by,
        )
        for row in explanation.ops
    )
    scale = formatting.number(explanation.loss_scale)
    parts = [
        f"# {explanation.model}, explained",
        f"Level {explanation.level}, loss scale {scale}.",
        _table(("", "", "details"), (each[:3] for each in formatting.lines(explanation))),
        "## Modules",
        _table(("module", "class", "dtype", "time", "casts:", "headroom:"), modules),
        "## Operators",
        _table(_OPERATORS, ops),
        *explanation.notes,
        "## Findings, by gain",
        "\n".join(f"1. {sentence}" for sentence in formatting.findings(explanation))
        or "No cast could be saved.",
    ]
    return "\n\n".join(parts) + "\n"


_OPERATORS = (
    *("direction", "module", "operator", "calls:", "in → out"),
    *("casts", "time:", "headroom:", "decided by"),
)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; columns whose name ends in a colon are right-aligned."""
    names = [name.rstrip(":") for name in head]
    rules = ["--:" if name.endswith(":") else "---" for name in head]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *escaped))
