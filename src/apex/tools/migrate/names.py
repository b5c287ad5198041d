"""The names of apex in a script, found by whatever name the script imports them."""

from __future__ import annotations

import ast
import symtable
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apex.tools.migrate.definitions import ROOTS, is_of_apex
from apex.tools.migrate.notes import CLIPPING, OPTIMIZER, OPTIMIZERS

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


def names(text: str) -> list[Name]:
    """Returns the names of apex in a script, imports included, in the order of its lines.

    Raises:
        SyntaxError: If it is not valid in the running version of Python.
    """
    words = [*ROOTS, *(name.removeprefix(OPTIMIZER) for name in OPTIMIZERS)]
    if not any(word in text for word in words):  # not worth parsing
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes are the script's concern
        visitor = _Visitor(symtable.symtable(text, "script", "exec"))
        visitor.visit(ast.parse(text))
    return sorted(visitor.found(), key=lambda name: name.line)


class _Visitor(ast.NodeVisitor):
    """Visits a script; Python's symbol table says which scope binds a name."""

    def __init__(self, module: symtable.SymbolTable) -> None:
        self._tables = [module]  # of the scopes around the visited node
        self._imports: dict[tuple[int, str], set[str]] = defaultdict(set)
        self._direct: list[Name] = []
        self._reads: list[tuple[int, str, list[str], Name]] = []
        self._calls: dict[ast.expr, tuple[str, ...]] = {}
        self._clipped: list[Name] = []
        self._has_masters = False

    def found(self) -> Iterator[Name]:
        """Yields the names; an import may stand below the function that reads it."""
        yield from self._direct
        if self._has_masters:
            yield from self._clipped
        for owner, root, attributes, use in self._reads:
            # Of several imports (`try` and `except`), apex's wins.
            imported = min(filter(is_of_apex, self._imports[owner, root]), default=None)
            full = ".".join([imported or root, *attributes])
            if imported is not None and full not in ROOTS:  # `apex is None` adds nothing
                yield Name(full, use.line, use.keywords)
            for attribute in () if imported is not None else attributes:
                if OPTIMIZER + attribute in OPTIMIZERS:
                    yield Name(OPTIMIZER + attribute, use.line)

    def _owner(self, name: str) -> int:
        """Returns the table that binds ``name``; the module's if no scope around does."""
        for depth, table in reversed([*enumerate(self._tables)]):
            try:
                symbol = table.lookup(name)
            except KeyError:
                continue
            if table.get_type() == "class" and depth < len(self._tables) - 1:
                continue  # its names are not visible in its methods
            if symbol.is_global():
                break
            if not symbol.is_free():
                return table.get_id()
        return self._tables[0].get_id()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            bound = alias.asname or package
            full = alias.name if alias.asname else package
            self._imports[self._owner(bound), bound].add(full)
            if is_of_apex(alias.name):
                self._direct.append(Name(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "" if node.level else node.module or ""  # a relative import is never apex's
        for alias in node.names:
            full, bound = f"{module}.{alias.name}", alias.asname or alias.name
            self._imports[self._owner(bound), bound].add(full)
            if is_of_apex(full):
                self._direct.append(Name(module if bound == "*" else full, alias.lineno))

    def visit_Call(self, node: ast.Call) -> None:
        keywords = [keyword.arg for keyword in node.keywords]
        self._calls[node.func] = tuple(filter(None, keywords))
        if _clips_a_model(node):
            self._clipped.append(Name(CLIPPING, node.lineno))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._has_masters |= node.value in MASTER_LEVELS

    def visit_Attribute(self, node: ast.Attribute) -> None:
        attributes: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        name = root.id if isinstance(root, ast.Name) else ""
        use = Name("", node.end_lineno or node.lineno, self._calls.get(node, ()))
        self._reads.append((self._owner(name), name, attributes, use))
        if not name:
            self.visit(root)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            use = Name("", node.lineno, self._calls.get(node, ()))
            self._reads.append((self._owner(node.id), node.id, [], use))

    def _visit_scope(self, node: Any) -> None:
        """Visits the body in its own scope, and the rest (defaults, bases) in the one around."""
        for child in ast.iter_child_nodes(node):
            if child not in node.body:
                self.visit(child)
        around = self._tables[-1]
        own = [
            table
            for table in around.get_children()
            if (table.get_name(), table.get_lineno()) == (node.name, node.lineno)
        ]
        self._tables.append(own[-1] if own else around)
        for child in node.body:
            self.visit(child)
        self._tables.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope  # noqa: N815


def _clips_a_model(call: ast.Call) -> bool:
    """Returns whether a call is ``clip_grad_norm_(model.parameters(), ...)`` or its like."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if not name.startswith(("clip_grad_norm", "clip_grad_value")) or not call.args:
        return False
    return ast.unparse(call.args[0]).endswith(".parameters()")
