"""Tests of the opt level in scripts, such as ``if config.AMP_OPT_LEVEL != "O0":``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")

_OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda level, levels: level in levels,
    ast.NotIn: lambda level, levels: level not in levels,
}


def levels_passing(node: ast.Compare) -> frozenset[str] | None:
    """Returns the levels for which a comparison holds; ``None`` if it tests something else."""
    if len(node.ops) != 1 or type(node.ops[0]) not in _OPERATORS:
        return None
    left, right, compare = node.left, node.comparators[0], _OPERATORS[type(node.ops[0])]
    membership = isinstance(node.ops[0], ast.In | ast.NotIn)
    given = _levels(right) if _is_level(left) else None
    if given is not None and membership != isinstance(given, str):
        return frozenset(level for level in LEVELS if compare(level, given))
    given = _levels(left) if _is_level(right) else None
    if isinstance(given, str) and not membership:
        return frozenset(level for level in LEVELS if compare(given, level))
    return None


def levels_offered(node: ast.Call) -> frozenset[str] | None:
    """Returns the levels among the ``choices`` of ``add_argument``; ``None`` for other calls."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "add_argument":
        return None
    for keyword in node.keywords:
        if keyword.arg == "choices" and isinstance(given := _levels(keyword.value), tuple):
            return frozenset(given)
    return None


def remark(passing: frozenset[str]) -> str:
    """Returns what a test that these levels pass means for O4 and O5, which apex did not have."""
    apart = [
        f"{new} and {old}"
        for new, old in (("O4", "O1"), ("O5", "O2"))
        if (new in passing) != (old in passing)
    ]
    if not apart:
        return (
            "Treats O4 and O5, the levels in bf16, like O1 and O2: select one to train in bf16; "
            "nothing else changes."
        )
    return f"Treats {' and '.join(apart)} differently: add the level in bf16 here to train with it."


def _is_level(node: ast.expr) -> bool:
    """Returns whether an expression is named for the opt level."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            pass
        case ast.Subscript(slice=ast.Constant(value=value)):
            name = str(value)
        case _:
            return False
    return "optlevel" in name.replace("_", "").replace("-", "").lower()


def _levels(node: ast.expr) -> str | tuple[str, ...] | None:
    """Returns the level, or several, that an expression spells out; ``None`` if it does not."""
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value in LEVELS else None
    if not isinstance(node, ast.Tuple | ast.List | ast.Set) or not node.elts:
        return None
    found = [each.value for each in node.elts if isinstance(each, ast.Constant)]
    levels = tuple(str(value) for value in found if value in LEVELS)
    return levels if len(levels) == len(node.elts) else None
