"""A comparison as table cells, and as text for the terminal."""

from __future__ import annotations

import math
import textwrap

from apex.debug.common import aligned
from apex.tools.compare.columns import COLUMNS
from apex.tools.compare.results import Comparison, Result
from apex.tools.compare.soundness import excess
from apex.tools.compare.training import end_loss
from apex.tools.compare.verdict import megabytes

NOTHING = "-"

WIDTH = 100

Row = dict[str, str]
"""One level's cells, by the names of the columns."""


def rows(comparison: Comparison) -> list[tuple[Result, Row]]:
    """Returns every level, but for those that were skipped, with its cells."""
    return [(r, _row(r, comparison)) for r in comparison.results if not r.skipped]


def comparison_text(comparison: Comparison, *, wide: bool = False) -> str:
    """Returns the table, failures, notes and the recommendation."""
    advice = comparison.recommendation
    errors = []
    for result in comparison.failed:
        errors += [f"{result.name}: {error}" for error in result.errors]
    parts = [
        wrapped(f"{comparison.target}: {comparison.steps} steps on {comparison.machine}"),
        text_table(comparison, wide=wide),
        "\n".join(map(wrapped, errors)),
        "\n".join(map(wrapped, comparison.notes)),
        "\n".join(
            [wrapped(advice.text), *(wrapped(f"  - {reason}", "    ") for reason in advice.reasons)]
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def text_table(comparison: Comparison, *, wide: bool = False) -> str:
    """Returns the table of the main columns; with ``wide``, of every column that is not empty."""
    cells = rows(comparison)
    columns = {
        name: column
        for name, column in COLUMNS.items()
        if column.is_compact or (wide and any(row[name] != NOTHING for _, row in cells))
    }
    lines = [[column.heading for column in columns.values()]]
    lines += [[row[name] for name in columns] for _, row in cells]
    table = aligned(lines, [column.is_left for column in columns.values()])
    body = ["  ".join(line).rstrip() for line in table]
    rule = "-" * max(map(len, body))
    more = [] if wide else ["--wide shows all columns; --help explains them."]
    return "\n".join([body[0], rule, *body[1:], rule, *more])


def wrapped(text: str, indent: str = "") -> str:
    """Returns a paragraph in lines of at most ``WIDTH`` characters; ``indent`` is of the others."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _row(result: Result, comparison: Comparison) -> Row:
    timing, speed, memory = result.timing, comparison.speed(result), result.memory
    record = result.training
    verdicts = {verdict.level: verdict.word for verdict in comparison.recommendation.verdicts}
    row = {
        **dict.fromkeys(COLUMNS, NOTHING),
        "level": result.name,
        "time": NOTHING if timing is None else three_digits(timing.median),
        "speed": NOTHING if speed is None or comparison.load.busy else f"{speed.median:.2f}x",
        "memory": megabytes(memory) if memory else NOTHING,
        "verdict": verdicts.get(result.name, NOTHING),
    }
    if record is not None:
        loss = end_loss(record.losses)
        row |= {
            "saved": megabytes(record.saved_bytes),
            "stored": f"{record.stored.per_param:.1f}",
            "loss": f"{loss:.4g}" if math.isfinite(loss) else "diverged",
            "apart": _apart(result, comparison),
            "evaluation": NOTHING if record.evaluation is None else f"{record.evaluation:.4g}",
            "skipped": f"{len(record.skipped)} of {len(record.losses)}",
            "frozen": NOTHING if record.frozen is None else _percent(record.frozen),
        }
    return row


def _apart(result: Result, comparison: Comparison) -> str:
    """Returns a level's mean paired difference and its standard error, such as "+0.2 ± 0.1"."""
    record, base = result.training, comparison.baseline.training
    if record is None or base is None or result is comparison.baseline:
        return NOTHING
    difference = excess(record.losses, base.losses)
    if difference is None:
        return NOTHING
    return f"{100 * difference.share:+.2g} ± {100 * difference.share_error:.1g}"


def three_digits(value: float) -> str:
    """Returns three digits of a time, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "inf"
    if share == 0:
        return "0 %"
    if share < 1e-4:
        return "<0.01 %"
    return f"{share * 100:.3g} %" if share < 0.1 else f"{share * 100:.0f} %"
