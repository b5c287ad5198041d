"""The names of apex in a script, found by whatever name the script imports them."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from apex.tools.migrate.definitions import ROOTS, is_of_apex
from apex.tools.migrate.notes import CLIPPING, OPTIMIZER, OPTIMIZERS
from apex.tools.source import bound_by, imported_by, of_scope

MASTER_LEVELS = ("O2", "O5")
"""Levels whose optimizer steps with fp32 copies of the model's gradients."""


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
    words = [*ROOTS, *(name.removeprefix(OPTIMIZER) for name in OPTIMIZERS)]
    return any(word in text for word in words)


def names(tree: ast.Module) -> list[Name]:
    """Returns the names of apex in a script, imports included, in the order of its lines."""
    visitor = _Visitor(tree)
    visitor.visit(tree)
    if visitor.has_masters:
        visitor.found += visitor.clippings
    return sorted(visitor.found, key=lambda name: name.line)


class _Visitor(ast.NodeVisitor):
    """Visits a script, and knows which names mean apex where.

    A name means apex if the script imports it from apex anywhere, except in functions that bind it
    to something else.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Name] = []
        self.clippings: list[Name] = []
        self.has_masters = False
        everywhere = _bound_by(ast.walk(tree))
        self._full_names = ChainMap({name: full for name, full in everywhere.items() if full})
        self._keywords: dict[ast.expr, tuple[str, ...]] = {}  # by the function that is called

    def _add(self, name: str, node: ast.expr) -> None:
        if name not in ROOTS:  # `apex is None` adds nothing
            line = node.end_lineno or node.lineno
            self.found.append(Name(name, line, self._keywords.get(node, ())))

    def _visit_function(self, node: Any) -> None:
        self._full_names = self._full_names.new_child(_bound_by(of_scope(node)))
        self.generic_visit(node)
        self._full_names = self._full_names.parents

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_of_apex(alias.name):
                self.found.append(Name(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias, (name, imported) in zip(node.names, imported_by(node), strict=True):
            if is_of_apex(imported.module):
                full = imported.module if name == "*" else str(imported)
                self.found.append(Name(full, alias.lineno))

    def visit_Call(self, node: ast.Call) -> None:
        keywords = [keyword.arg for keyword in node.keywords]
        self._keywords[node.func] = tuple(filter(None, keywords))
        if _clips_a_model(node):
            self.clippings.append(Name(CLIPPING, node.lineno))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in MASTER_LEVELS:
            self.has_masters = True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        attributes: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        full = self._full_names.get(root.id) if isinstance(root, ast.Name) else ""
        if full:
            self._add(".".join([full, *attributes]), node)
            return
        for attribute in attributes:
            if OPTIMIZER + attribute in OPTIMIZERS:
                self._add(OPTIMIZER + attribute, node)
        self.visit(root)

    def visit_Name(self, node: ast.Name) -> None:
        full = self._full_names.get(node.id)
        if full and isinstance(node.ctx, ast.Load):
            self._add(full, node)


def _bound_by(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Returns the names that nodes bind: apex's by their full names, the others by ``""``.

    Of several imports (``try`` and ``except``), apex's wins.
    """
    bound: dict[str, str] = {}
    for node in nodes:
        for name, imported in imported_by(node):
            if is_of_apex(imported.module):
                bound[name] = str(imported)
        bound.setdefault(bound_by(node) or "", "")
    return bound


def _clips_a_model(call: ast.Call) -> bool:
    """Returns whether a call is ``clip_grad_norm_(model.parameters(), ...)`` or its like."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if not name.startswith(("clip_grad_norm", "clip_grad_value")) or not call.args:
        return False
    return ast.unparse(call.args[0]).endswith(".parameters()")
