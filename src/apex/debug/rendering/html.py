"""An explanation as one self-contained page: the model's tree coloured by dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from apex.debug.explanation import Explanation, ModuleRow
from apex.debug.records import CAST, OpRow
from apex.debug.rendering import formatting
from apex.debug.rendering.pages import render

_OPEN_DEPTH = 1
"""Modules down to this depth are initially expanded."""

_DTYPES = ("fp16", "bf16", "fp32", "fp64")


@dataclass(frozen=True)
class Node:
    """One line of the tree, with the lines below it.

    Attributes:
        label: Name of the module inside its parent.
        kind: Class name.
        tone: CSS class of its dtype.
        bar: CSS class and share of all time, by dtype.
        time_share: Share of all time.
        casts: Count and bytes of its casts, formatted.
        ops: Operators that ran in its own code.
        children: Modules inside it.
        module: Its totals; ``None`` for code outside the model.
        is_open: Whether it is initially expanded.
    """

    label: str
    kind: str
    tone: str
    bar: tuple[tuple[str, float], ...]
    time_share: float
    casts: str
    ops: tuple[OpRow, ...]
    children: tuple[Node, ...] = ()
    module: ModuleRow | None = None
    is_open: bool = False


def page(explanation: Explanation) -> str:
    """Returns the whole page; it loads nothing and runs no script."""
    found = {_tone(row.computed_in) for row in explanation.ops}
    outside = _outside(explanation)
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
        trees=[_Tree(explanation).node("", 0), *([outside] if outside else [])],
    )


class _Tree:
    """Builds the nodes of a model's modules."""

    def __init__(self, explanation: Explanation) -> None:
        self._explanation = explanation
        self._modules = {row.name: row for row in explanation.modules}
        self._children: dict[str, list[str]] = {}
        for name in self._modules:
            if name:
                self._children.setdefault(self._parent(name), []).append(name)

    def node(self, name: str, depth: int) -> Node:
        """Returns a module with the operators and modules inside it."""
        module = self._modules[name]
        inside = [row for row in self._explanation.ops if row.inside]
        prefix = f"{name}." if name else ""
        size = formatting.size(module.cast_bytes)
        return Node(
            label=name[len(self._parent(name)) :].lstrip(".") if name else "(model)",
            kind=module.kind,
            tone=_tone(module.dtype),
            bar=_bar(
                self._explanation,
                (row for row in inside if row.module == name or row.module.startswith(prefix)),
            ),
            time_share=module.time_share,
            casts=f"{formatting.amount(module.casts)} · {size}" if module.casts else "",
            ops=tuple(row for row in inside if row.module == name),
            children=tuple(self.node(child, depth + 1) for child in self._children.get(name, ())),
            module=module,
            is_open=depth <= _OPEN_DEPTH,
        )

    def _parent(self, name: str) -> str:
        parent = name.rpartition(".")[0]
        while parent and parent not in self._modules:  # a shared module is listed under one name
            parent = parent.rpartition(".")[0]
        return parent


def _outside(explanation: Explanation) -> Node | None:
    """Returns the code outside the model: the loss."""
    rows = tuple(row for row in explanation.ops if not row.inside)
    if not rows:
        return None
    casts = sum(cast.count for row in rows for cast in row.casts)
    return Node(
        label="(outside)",
        kind="the loss",
        tone="none",
        bar=_bar(explanation, rows),
        time_share=sum(explanation.time_share(row) for row in rows),
        casts=formatting.amount(casts) if casts else "",
        ops=rows,
    )


def _bar(explanation: Explanation, rows: Iterable[OpRow]) -> tuple[tuple[str, float], ...]:
    shares: dict[str, float] = {}
    for row in rows:
        tone = _tone(row.computed_in)
        shares[tone] = shares.get(tone, 0.0) + explanation.time_share(row)
    return tuple(sorted(shares.items()))


def _tone(dtype: str) -> str:
    """Returns the CSS class that colours a dtype."""
    return formatting.short(dtype) if dtype else "none"
