"""An explanation in Markdown: totals, modules and operators as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from apex.amp.debug.explanation import Explanation
from apex.amp.debug.rendering import words


def markdown(explanation: Explanation) -> str:
    """Returns the explanation with every row; for an issue, or a file beside the run."""
    modules = (
        (
            f"`{words.place(row.name)}`",
            row.kind,
            words.short(row.dtype),
            words.percent(row.time_share),
            words.amount(row.casts),
            words.bits(row.headroom),
        )
        for row in explanation.modules
    )
    ops = (
        (
            row.direction,
            words.place(row.module, row.inside),
            f"`{row.op}`",
            words.amount(row.calls),
            words.types(row),
            words.casts(row),
            words.percent(explanation.time_share(row)),
            words.bits(row.headroom) + (" **inf!**" if row.nonfinite else ""),
            row.decided_by,
        )
        for row in explanation.ops
    )
    scale = words.number(explanation.loss_scale)
    parts = [
        f"# {explanation.model}, explained",
        f"Level {explanation.level}, loss scale {scale}.",
        _table(("", "", "what it is"), words.findings(explanation)),
        "## Modules",
        _table(("module", "class", "dtype", "time", "casts:", "headroom:"), modules),
        "## Operators",
        _table(_OPERATORS, ops),
        *explanation.notes,
    ]
    return "\n\n".join(parts) + "\n"


_OPERATORS = (
    *("direction", "module", "operator", "calls:", "in → out"),
    *("casts", "time:", "headroom:", "decided by"),
)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; a name that ends in a colon aligns its column to the right."""
    names = [name.rstrip(":") for name in head]
    rules = ["--:" if name.endswith(":") else "---" for name in head]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *escaped))
