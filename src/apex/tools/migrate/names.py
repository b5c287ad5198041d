"""Finds the uses of apex in a script, whatever names the script imports them by."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from apex.tools.migrate.definitions import ROOTS, is_of_apex
from apex.tools.migrate.notes import CLIPPING, OPTIMIZER, OPTIMIZERS
from apex.tools.source import Imported, bound_by, of_scope

MASTER_LEVELS = ("O2", "O5")
"""Levels whose optimizer updates fp32 masters."""


@dataclass(frozen=True)
class Name:
    """A full name of apex in a script, such as ``apex.amp.initialize`` or ``optimizer._amp_stash``.

    Attributes:
        name: The name.
        line: From 1.
        keywords: Keyword arguments of the call.
    """

    name: str
    line: int
    keywords: tuple[str, ...] = ()


def mentions_apex(text: str) -> bool:
    """Returns whether a source may use apex, so that it is worth parsing."""
    words = [name.removeprefix(OPTIMIZER) for name in (*ROOTS, *OPTIMIZERS)]
    return any(word in text for word in words)


def names(tree: ast.Module) -> list[Name]:
    """Returns the names of apex in a script, imports included, in the order of its lines."""
    visitor = _Visitor(tree)
    visitor.visit(tree)
    if visitor.has_masters:
        visitor.uses += visitor.clippings
    return sorted(visitor.uses, key=lambda name: name.line)


class _Visitor(ast.NodeVisitor):
    """Visits a script and collects the names of apex.

    A name refers to apex if the script imports it from apex anywhere, except in functions that bind
    it to something else.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[Name] = []
        # Calls that clip a model's gradients; they matter if the script has masters.
        self.clippings: list[Name] = []
        self.has_masters = False
        self._full_names = _full_names(ast.walk(tree))
        # Keyword arguments by the function that is called.
        self._keywords: dict[ast.expr, tuple[str, ...]] = {}

    def _add(self, name: str, node: ast.expr) -> None:
        if name in ROOTS:  # as in `apex is None`
            return
        line = node.end_lineno or node.lineno
        keywords = self._keywords.get(node, ())
        self.uses.append(Name(name, line, keywords))

    def _visit_function(self, node: Any) -> None:
        outer = self._full_names
        self._full_names = outer | _full_names(of_scope(node))
        self.generic_visit(node)
        self._full_names = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_of_apex(alias.name):
                self.uses.append(Name(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or not is_of_apex(module):
            return
        for alias in node.names:
            full_name = module if alias.name == "*" else f"{module}.{alias.name}"
            self.uses.append(Name(full_name, alias.lineno))

    def visit_Call(self, node: ast.Call) -> None:
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
        self._keywords[node.func] = tuple(keywords)
        if _clips_a_model(node):
            self.clippings.append(Name(CLIPPING, node.lineno))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in MASTER_LEVELS:
            self.has_masters = True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full_name = self._full_name(node)
        if full_name:
            self._add(full_name, node)
            return
        self.visit(node.value)
        attribute = OPTIMIZER + node.attr
        if attribute in OPTIMIZERS:
            self._add(attribute, node)

    def visit_Name(self, node: ast.Name) -> None:
        full_name = self._full_name(node)
        if full_name and isinstance(node.ctx, ast.Load):
            self._add(full_name, node)

    def _full_name(self, node: ast.expr) -> str:
        """Returns the full name of an expression such as ``amp.init``; empty outside apex."""
        if isinstance(node, ast.Name):
            return self._full_names.get(node.id, "")
        if not isinstance(node, ast.Attribute):
            return ""
        owner = self._full_name(node.value)
        if not owner:
            return ""
        return f"{owner}.{node.attr}"


def _full_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Returns the names that nodes bind: apex's with their full names, the others with ``""``.

    If there are several imports (``try`` and ``except``), apex's wins.
    """
    full_names = {}
    for node in nodes:
        for name, bound in bound_by(node):
            if isinstance(bound, Imported) and is_of_apex(bound.module):
                full_names[name] = str(bound)
            else:
                full_names.setdefault(name, "")
    return full_names


def _clips_a_model(call: ast.Call) -> bool:
    """Returns whether a call clips ``model.parameters()``, as in ``clip_grad_norm_``."""
    if not call.args:
        return False
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    if not name.startswith(("clip_grad_norm", "clip_grad_value")):
        return False
    clipped = ast.unparse(call.args[0])
    return clipped.endswith(".parameters()")
