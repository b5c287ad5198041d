"""An explanation as one self-contained page: the model's tree coloured by dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from apex.debug.explanation import Explanation, ModuleRow
from apex.debug.records import CAST, OpRow
from apex.debug.rendering import formatting
from apex.debug.rendering.style import STYLE

_NEAR = 2.0
"""Headroom (powers of two) below which a row is marked."""

_OPEN_DEPTH = 1
"""Modules down to this depth are open at first."""


def page(explanation: Explanation) -> str:
    """Returns the whole page; it loads nothing and runs no script."""
    title = f"{escape(explanation.model)}, explained"
    scale = formatting.number(explanation.loss_scale)
    seconds = explanation.totals.seconds
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<div class="soft">Level {escape(explanation.level)} · loss scale {scale} · \
{seconds * 1000:.3g} ms in operators</div>
<div class="tiles">{"".join(_tiles(explanation))}</div>
<h2>The model</h2>
<div class="legend">{"".join(_legend(explanation))}</div>
<div class="card tree">{_TREE_HEAD}{_Tree(explanation).node("", 0)}{_outside(explanation)}</div>
<h2>Operators, by time</h2>
<div class="card scroll">{_table(explanation)}</div>
<div class="notes">{"".join(f"<p>{escape(note)}</p>" for note in explanation.notes)}</div>
</main>
</body>
</html>
"""


_TREE_HEAD = """<div class="leaf head"><span class="label">module</span>\
<span>time</span><span></span><span class="right wide">casts</span>\
<span class="right wide">headroom</span></div>"""


def _tiles(explanation: Explanation) -> Iterator[str]:
    totals = explanation.totals
    alarms = {
        "Casts there and back": bool(totals.wasted_casts),
        "Nearest to its limit": _is_near(totals.headroom),
        "Results not finite": bool(totals.nonfinite_share),
        "Lost in casts to 16 bits": bool(totals.overflow_share),
    }
    for name, value, more in formatting.findings(explanation):
        kind = "tile alarm" if alarms.get(name) else "tile"
        yield (
            f'<div class="{kind}"><div class="name">{name}</div>'
            f'<div class="value">{value}</div>'
            f'<div class="more">{escape(more).replace(" %", "&nbsp;%")}</div></div>'
        )


def _legend(explanation: Explanation) -> Iterator[str]:
    found = {formatting.short(row.computed_in) for row in explanation.ops if row.computed_in}
    for name in ("fp16", "bf16", "fp32", "fp64"):
        if name in found:
            yield f'<span><i class="dot {name}"></i>{name}</span>'
    yield '<span><i class="dot mixed"></i>several in the forward pass</span>'
    yield '<span><i class="dot none"></i>nothing computed</span>'
    yield '<span class="soft">→ forward, ← backward</span>'


class _Tree:
    """The model's modules as nested ``<details>``."""

    def __init__(self, explanation: Explanation) -> None:
        self._explanation = explanation
        self._modules = {row.name: row for row in explanation.modules}
        self._children: dict[str, list[str]] = {}
        for name in self._modules:
            if name:
                self._children.setdefault(self._parent(name), []).append(name)
        self._own: dict[str, list[OpRow]] = {}
        for op in explanation.ops:
            if op.inside:
                self._own.setdefault(op.module, []).append(op)

    def node(self, name: str, depth: int) -> str:
        """Returns a module with what ran in it and the modules below it."""
        row = self._modules[name]
        below = "".join(self.node(child, depth + 1) for child in self._children.get(name, ()))
        label = name[len(self._parent(name)) :].lstrip(".") if name else "(model)"
        opened = " open" if depth <= _OPEN_DEPTH else ""
        line = _line(label, row.kind, _tone(row), self._bar(name), row.time_share, _cells(row))
        return (
            f"<details{opened}><summary>{line}</summary>"
            f"<div>{_ops(self._explanation, self._own.get(name, []))}{below}</div></details>"
        )

    def _parent(self, name: str) -> str:
        parent = name.rpartition(".")[0]
        while parent and parent not in self._modules:  # a shared module goes by one name
            parent = parent.rpartition(".")[0]
        return parent

    def _bar(self, name: str) -> str:
        prefix = f"{name}." if name else ""
        rows = (
            row
            for row in self._explanation.ops
            if row.inside and (row.module == name or row.module.startswith(prefix))
        )
        return _bar(self._explanation, rows)


def _outside(explanation: Explanation) -> str:
    """Returns what ran outside of the model: the loss."""
    rows = [row for row in explanation.ops if not row.inside]
    if not rows:
        return ""
    share = sum(explanation.time_share(row) for row in rows)
    casts = sum(cast.count for row in rows for cast in row.casts)
    cells = _two(formatting.amount(casts) if casts else "", "")
    line = _line("(outside)", "the loss", "none", _bar(explanation, rows), share, cells)
    return f"<details><summary>{line}</summary><div>{_ops(explanation, rows)}</div></details>"


def _line(label: str, kind: str, tone: str, bar: str, share: float, cells: str) -> str:
    return (
        f'<span class="label"><i class="dot {tone}"></i><b>{escape(label)}</b>'
        f'<span class="soft">{escape(kind)}</span></span>'
        f'{bar}<span class="right">{formatting.percent(share)}</span>{cells}'
    )


def _bar(explanation: Explanation, rows: Iterable[OpRow]) -> str:
    """Returns a bar as long as the rows' share of the time, in the colours of their dtypes."""
    shares: dict[str, float] = {}
    for row in rows:
        tone = formatting.short(row.computed_in) if row.computed_in else "none"
        shares[tone] = shares.get(tone, 0.0) + explanation.time_share(row)
    parts = (
        f'<i class="{tone}" style="width:{100 * share:.2f}%" '
        f'title="{tone} {formatting.percent(share)}"></i>'
        for tone, share in sorted(shares.items())
    )
    return f'<span class="bar">{"".join(parts)}</span>'


def _cells(row: ModuleRow) -> str:
    casts = (
        f"{formatting.amount(row.casts)} · {formatting.size(row.cast_bytes)}" if row.casts else ""
    )
    return _two(casts, _headroom(row.headroom, row.nonfinite))


def _two(casts: str, headroom: str) -> str:
    return f'<span class="right wide">{casts}</span><span class="right wide">{headroom}</span>'


def _headroom(headroom: float | None, nonfinite: int) -> str:
    if nonfinite:
        return f'<span class="alarm-text">{formatting.amount(nonfinite)} not finite</span>'
    text = formatting.bits(headroom)
    return f'<span class="alarm-text">{text}</span>' if _is_near(headroom) else text


def _is_near(headroom: float | None) -> bool:
    return headroom is not None and headroom < _NEAR


def _tone(row: ModuleRow) -> str:
    return formatting.short(row.dtype) if row.dtype else "none"


def _ops(explanation: Explanation, rows: list[OpRow]) -> str:
    if not rows:
        return ""
    return f'<div class="ops">{"".join(_op(explanation, row) for row in rows)}</div>'


def _op(explanation: Explanation, row: OpRow) -> str:
    times = f" &times;{row.calls}" if row.calls > 1 else ""
    made = formatting.casts(row) if row.op != CAST else ""
    casts = f"<span>casts {escape(made)}</span>" if made else ""
    share = formatting.percent(explanation.time_share(row))
    warned = row.nonfinite or _is_near(row.headroom)
    alarm = f"<span>headroom {_headroom(row.headroom, row.nonfinite)}</span>" if warned else ""
    return (
        f'<div class="op">{_way(row)}'
        f"<code>{escape(row.op.removeprefix('aten.'))}{times}</code>{_types(row)}"
        f'<span>{share}</span>{casts}{alarm}<span class="why">{escape(row.decided_by)}</span></div>'
    )


def _way(row: OpRow) -> str:
    arrow = "→" if row.direction == "forward" else "←"
    return f'<span class="way" title="{row.direction}">{arrow}</span>'


def _types(row: OpRow) -> str:
    tone = formatting.short(row.computed_in) if row.computed_in else "none"
    return f'<span class="type {tone}">{formatting.types(row)}</span>'


def _table(explanation: Explanation) -> str:
    rows = sorted(explanation.ops, key=lambda row: -row.seconds)
    body = "".join(_table_row(explanation, row) for row in rows)
    return f"<table><thead><tr>{_TABLE_HEAD}</tr></thead><tbody>{body}</tbody></table>"


_TABLE_HEAD = (
    "<th></th><th>module</th><th>operator</th><th class=n>calls</th><th>in → out</th>"
    "<th>casts</th><th class=n>time</th><th class=n>FLOPs</th><th class=n>headroom</th>"
    "<th>decided by</th>"
)


def _table_row(explanation: Explanation, row: OpRow) -> str:
    op = escape(row.op.removeprefix("aten."))
    return (
        f"<tr><td>{_way(row)}</td><td>{escape(formatting.place(row.module, row.inside))}</td>"
        f'<td class=op-name title="{op}"><code>{op}</code></td>'
        f"<td class=n>{formatting.amount(row.calls)}</td><td>{_types(row)}</td>"
        f"<td>{escape(formatting.casts(row))}</td>"
        f"<td class=n>{formatting.percent(explanation.time_share(row))}</td>"
        f"<td class=n>{formatting.amount(row.flops) if row.flops else ''}</td>"
        f"<td class=n>{_headroom(row.headroom, row.nonfinite)}</td>"
        f"<td>{escape(row.decided_by)}</td></tr>"
    )
