"""Every use of apex in a script."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from apex.tools.migrate.level_tests import levels_offered, levels_passing
from apex.tools.migrate.notes import OPTIMIZER_ATTRIBUTES
from apex.tools.migrate.script import ROOTS, Script, is_of_apex

OPTIMIZER = "optimizer."
"""Prefix for the attributes that amp and apex's wrappers add to optimizers."""


@dataclass(frozen=True)
class Use:
    """One place that names something of apex.

    Attributes:
        name: In full, such as ``apex.amp.initialize``, or ``optimizer._amp_stash``.
        line: From 1.
        column: From 1.
        keywords: Keyword arguments of the call.
        quoted: Whether it is a string, as in configs and for ``import_module``.
        passing: For a test of the opt level, such as ``args.opt_level != "O0"``, the levels that
            pass it; ``None`` for anything else.
    """

    name: str
    line: int
    column: int
    keywords: tuple[str, ...] = ()
    quoted: bool = False
    passing: frozenset[str] | None = None


def may_use_apex(text: str) -> bool:
    """Returns whether ``text`` is worth parsing."""
    return any(word in text for word in (*ROOTS, *OPTIMIZER_ATTRIBUTES))


def uses(script: Script) -> list[Use]:
    """Returns the uses, imports included, in the order of the file."""
    visitor = _UseVisitor(script)
    visitor.visit(script.module)
    # A script without amp may have levels of its own.
    tests = visitor.tests if any(is_of_apex(use.name) for use in visitor.found) else []
    return sorted(visitor.found + tests, key=lambda use: (use.line, use.column))


class _UseVisitor(ast.NodeVisitor):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.found: list[Use] = []
        self.tests: list[Use] = []
        self._calls: dict[ast.expr, ast.Call] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_of_apex(alias.name):
                self._add(alias, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module or not is_of_apex(node.module):
            return
        for alias in node.names:
            if alias.name == "*":
                self._add(node, node.module)
            else:
                self._add(alias, f"{node.module}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        self._calls[node.func] = node
        self._add_test(node, levels_offered(node))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._add_test(node, levels_passing(node))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.script.apex_name(node)
        if name is not None:
            self._add(node, name)
            return
        if node.attr in OPTIMIZER_ATTRIBUTES:
            self._add_attribute(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        name = self.script.apex_name(node)
        # `amp = None` and `apex is None` add nothing to the import.
        if isinstance(node.ctx, ast.Load) and name is not None and name not in ROOTS:
            self._add(node, name)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, str) and is_of_apex(value) and _is_dotted(value):
            self._add(node, value, quoted=True)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for part in node.values:  # a constant part is not a full name
            if not isinstance(part, ast.Constant):
                self.visit(part)

    def _add(
        self, node: ast.expr | ast.stmt | ast.alias, name: str, *, quoted: bool = False
    ) -> None:
        column = self.script.column(node.lineno, node.col_offset)
        self.found.append(Use(name, node.lineno, column, self._keywords(node), quoted))

    def _add_test(self, node: ast.expr, passing: frozenset[str] | None) -> None:
        if passing is not None:
            name = ast.unparse(node)
            column = self.script.column(node.lineno, node.col_offset)
            self.tests.append(Use(name, node.lineno, column, passing=passing))

    def _add_attribute(self, node: ast.Attribute) -> None:
        line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        column = self.script.column(line, end) - len(node.attr)
        self.found.append(Use(OPTIMIZER + node.attr, line, column, self._keywords(node)))

    def _keywords(self, node: ast.AST) -> tuple[str, ...]:
        call = self._calls.get(node) if isinstance(node, ast.expr) else None
        return tuple(each.arg for each in call.keywords if each.arg) if call else ()


def _is_dotted(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))
