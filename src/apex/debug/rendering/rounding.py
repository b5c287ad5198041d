"""A rounding trace as text and as one self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apex.debug.rendering import formatting
from apex.debug.rendering.pages import render
from apex.debug.rounding_records import RoundingRow

if TYPE_CHECKING:
    from apex.debug.rounding import RoundingTrace

HEAD = ("module", "operator", "pass", "dtype", "calls", "error", "tolerance", "inherited")
"""The columns of both tables."""


def text(trace: RoundingTrace, *, rows: int | None) -> str:
    """Returns the verdict and a table of the most suspicious operators."""
    lines = [verdict(trace)]
    worst = trace.worst
    if worst is not None:
        lines += [f"  at     {worst.location}"] if worst.location else []
        lines += [f"  cause  {worst.cause}", f"  remedy {worst.remedy}"]
    shown = [cells(row) for row in trace.rows[:rows]]
    if shown:
        table = formatting.aligned([HEAD, *shown], [True] * len(HEAD))
        lines += ["", *("  ".join(line).rstrip() for line in table)]
    lines += [f"skipped: {line}" for line in skips(trace)]
    return "\n".join(lines)


def page(trace: RoundingTrace) -> str:
    """Returns the page; it loads nothing and runs no script."""
    return render(
        "apex.debug.rendering",
        "rounding.html.jinja",
        verdict=verdict(trace),
        worst=trace.worst,
        head=HEAD,
        rows=[(cells(row), row.suspicion, bool(row.kind)) for row in trace.rows],
        skips=skips(trace),
    )


def verdict(trace: RoundingTrace) -> str:
    """Returns what was found, in one line."""
    worst = trace.worst
    if worst is None:
        rest = f"; {len(trace.skipped)} without a verdict" if trace.skipped else ""
        return (
            f"No digits lost: {trace.operators} operators traced, all within their tolerance{rest}."
        )
    return (
        f"Digits first lost: {worst.op} {worst.place}, {worst.direction}, in {worst.dtype}: error "
        f"{worst.error:.2g}, explained {worst.tolerance:.2g}, inherited {worst.inherited:.2g}"
    )


def cells(row: RoundingRow) -> tuple[str, ...]:
    """Returns one line of a table."""
    return (
        formatting.place(row.module, row.inside),
        row.op.removeprefix("aten."),
        row.direction,
        formatting.short(row.dtype),
        formatting.amount(row.calls),
        *(f"{value:.2g}" for value in (row.error, row.tolerance, row.inherited)),
    )


def skips(trace: RoundingTrace) -> list[str]:
    """Returns a line for each operator without a verdict."""
    return [f"{each.op} in {each.module or '(no module)'}: {each.reason}" for each in trace.skipped]
