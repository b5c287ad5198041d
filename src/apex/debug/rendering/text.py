"""An explanation in a terminal: totals, the model's tree, and a table of operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from apex.debug.records import OpRow
from apex.debug.rendering import formatting

if TYPE_CHECKING:
    from apex.debug.explanation import Explanation, ModuleRow

_COLOURS = {"fp32": "34", "fp64": "34", "fp16": "33", "bf16": "32", "mixed": "35"}
_WIDTH = 26  # of the longest operator's name
_BLOCKS = " ▏▎▍▌▋▊▉█"


def text(explanation: Explanation, *, rows: int | None, colour: bool) -> str:
    """Returns tables drawn with box characters; see :meth:`Explanation.to_text`."""
    scale = formatting.number(explanation.loss_scale)
    level = f"level {explanation.level}, loss scale {scale}"
    title = f"{explanation.model}, explained · {level}"
    totals = [line[:3] for line in formatting.lines(explanation)]
    shown = _longest(explanation, rows)
    parts = [
        f"{title}\n{'━' * len(title)}",
        "\n".join(
            f"  {'  '.join(line).rstrip()}"
            for line in formatting.aligned(totals, (True, False, True))
        ),
        "\n".join(_table(_MODULE_HEAD, list(_modules(explanation)), colour)),
        "\n".join(_table(_OP_HEAD, list(_operators(explanation, shown)), colour)),
    ]
    hidden = len(explanation.ops) - len(shown)
    if hidden:
        parts.append(f"{hidden} faster rows omitted; to_json() and to_html() show all.")
    findings = formatting.findings(explanation)
    numbered = [f"  {number}. {sentence}" for number, sentence in enumerate(findings, 1)]
    heading = "Findings, by gain" if findings else "Findings: no cast could be saved."
    return "\n\n".join([*parts, "\n".join(explanation.notes), "\n".join([heading, *numbered])])


_MODULE_HEAD = ("module", "<class", "<dtype", "<time", "casts", "headroom")
_OP_HEAD = ("<where", "<operator", "calls", "<dtypes", "<casts", "time", "headroom", "<decided by")


def _modules(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    parts = formatting.parts(explanation.modules)
    for label, row in [("(model)", explanation.modules[0]), *_tree(parts, "")]:
        yield (
            label,
            row.kind,
            formatting.short(row.dtype),
            _bar(row.time_share),
            formatting.amount(row.casts) if row.casts else "",
            formatting.bits(row.headroom),
        )


def _tree(
    parts: Mapping[str, Sequence[ModuleRow]], parent: str, lines: str = ""
) -> Iterator[tuple[str, ModuleRow]]:
    """Yields the modules inside one, each with its own name after the lines that lead to it."""
    for row in parts[parent]:
        is_last = row is parts[parent][-1]
        yield f"{lines}{'└─' if is_last else '├─'} {row.name.rpartition('.')[2]}", row
        yield from _tree(parts, row.name, f"{lines}{' ' if is_last else '│'}  ")


def _operators(explanation: Explanation, shown: Sequence[OpRow]) -> Iterator[tuple[str, ...] | str]:
    direction = ""
    for row in shown:
        if row.direction != direction:
            direction = row.direction
            yield direction
        name = row.op.removeprefix("aten.")
        yield (
            formatting.place(row.module, row.inside),
            name if len(name) <= _WIDTH else f"{name[: _WIDTH - 1]}…",
            formatting.amount(row.calls),
            formatting.types(row),
            formatting.casts(row),
            formatting.percent(explanation.time_share(row)),
            formatting.bits(row.headroom) + (" inf!" if row.nonfinite else ""),
            row.decided_by,
        )


def _longest(explanation: Explanation, count: int | None) -> list[OpRow]:
    rows = list(explanation.ops)
    if count is None or len(rows) <= count:
        return rows
    last = sorted((row.seconds for row in rows), reverse=True)[count - 1]
    return [row for row in rows if row.seconds >= last][:count]


def _table(
    head: Sequence[str], rows: Sequence[tuple[str, ...] | str], colour: bool
) -> Iterator[str]:
    """Yields the lines of a table; a row that is a single string is a heading."""
    left = [index == 0 or name.startswith("<") for index, name in enumerate(head)]
    names = [name.lstrip("<") for name in head]
    cells = [names, *(row for row in rows if not isinstance(row, str))]
    first, *padded = formatting.aligned(cells, left)
    lines = iter(padded)
    yield _rule("╭┬╮", first)
    yield f"│ {' │ '.join(first)} │"
    if not rows or not isinstance(rows[0], str):
        yield _rule("├┼┤", first)
    for row in rows:
        if isinstance(row, str):
            rule = _rule("├┼┤", first)
            yield f"{rule[:2]} {row} {rule[len(row) + 4 :]}"
        else:
            line = next(lines)
            yield f"│ {' │ '.join(map(_coloured, line) if colour else line)} │"
    yield _rule("╰┴╯", first)


def _coloured(cell: str) -> str:
    for name, code in _COLOURS.items():
        cell = cell.replace(name, f"\x1b[{code}m{name}\x1b[0m")
    return cell


def _rule(ends: str, cells: Sequence[str]) -> str:
    return ends[0] + ends[1].join("─" * (len(cell) + 2) for cell in cells) + ends[2]


def _bar(share: float, width: int = 8) -> str:
    eighths = round(share * width * 8)
    bar = "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()
    return f"{bar:<{width}} {formatting.percent(share):>7}"
