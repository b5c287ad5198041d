"""One parsed Python file, and the imports that its names refer to, scope by scope."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""The top-level modules of this distribution."""


class Script:
    """A parsed file.

    Attributes:
        module: Its syntax tree; the methods take its nodes.
    """

    def __init__(self, text: str) -> None:
        """Parses ``text``.

        Raises:
            SyntaxError: If it is not valid in the running version of Python.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the script's concern
            self.module = ast.parse(text)
        self._lines = re.split(r"\r\n|\r|\n", text)
        visitor = _ScopeVisitor()
        visitor.visit(self.module)
        self._scopes = visitor.scopes

    def column(self, line: int, offset: int) -> int:
        """Returns the column, in characters from 1, of a byte offset in a line."""
        return len(self._lines[line - 1].encode()[:offset].decode()) + 1

    def apex_name(self, node: ast.expr) -> str | None:
        """Returns the full name of ``node`` if it is apex's, such as ``apex.amp.initialize``.

        Aliases are resolved. If a name has several imports (``try`` and ``except``), apex's wins.
        """
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        found = sorted(filter(is_of_apex, self._scopes[node].imports_of(node.id)))
        return ".".join([found[0], *attributes]) if found else None


def is_of_apex(name: str) -> bool:
    """Returns whether a full name is one of apex."""
    return name.partition(".")[0] in ROOTS


class _Scope:
    """The names bound in a module, class, function or comprehension."""

    def __init__(self, parent: _Scope | None = None, *, is_class: bool = False) -> None:
        self.parent = parent
        self.is_class = is_class
        self._imports: dict[str, set[str]] = defaultdict(set)
        self._owners: dict[str, _Scope] = {}

    def bind(self, name: str, imported: str | None = None) -> None:
        """Binds ``name`` to an imported full name or, by default, to a local value."""
        self._owners.get(name, self)._imports[name].update([imported] if imported else [])

    def declare(self, name: str, owner: _Scope) -> None:
        """Makes ``name`` refer to another scope, as ``global`` and ``nonlocal`` do."""
        self._owners[name] = owner

    def imports_of(self, name: str) -> set[str]:
        """Returns the full names that ``name`` is imported from; empty for a local value."""
        scope: _Scope | None = self._owners.get(name, self)
        while scope is not None and name not in scope._imports:
            scope = scope.enclosing
        return set() if scope is None else scope._imports[name]

    @property
    def enclosing(self) -> _Scope | None:
        """The next scope that Python searches; names of a class are not visible in its methods."""
        scope = self.parent
        while scope is not None and scope.is_class:
            scope = scope.parent
        return scope

    @property
    def module(self) -> _Scope:
        return self if self.parent is None else self.parent.module


class _ScopeVisitor(ast.NodeVisitor):
    """Finds the scope of every name in a module.

    Attributes:
        scopes: The scope that each name is looked up in.
    """

    def __init__(self) -> None:
        self.scopes: dict[ast.Name, _Scope] = {}
        self._scope = _Scope()

    def visit_Name(self, node: ast.Name) -> None:
        self.scopes[node] = self._scope
        if not isinstance(node.ctx, ast.Load):
            self._scope.bind(node.id)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            self._scope.bind(alias.asname or package, alias.name if alias.asname else package)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            # A relative import is never apex's.
            full = None if node.level else f"{node.module}.{alias.name}"
            self._scope.bind(alias.asname or alias.name, full)

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self._scope.declare(name, self._scope.module)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            self._scope.declare(name, self._scope.enclosing or self._scope)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._scope.bind(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.bind(node.name)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._inside(is_class=True):
            self._visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scope.bind(node.name)
        self._visit_all(node.decorator_list)
        self._visit_function(node.args, [node.returns] if node.returns else [], node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast names them

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node.args, [], [node.body])

    def visit_ListComp(self, node: ast.expr) -> None:
        with self._inside():
            self.generic_visit(node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def _visit_function(
        self, args: ast.arguments, outside: list[ast.expr], body: Iterable[ast.AST]
    ) -> None:
        self.visit(args)  # defaults and annotations belong to the scope around
        self._visit_all(outside)
        with self._inside():
            for arg in ast.walk(args):
                if isinstance(arg, ast.arg):
                    self._scope.bind(arg.arg)
            self._visit_all(body)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    @contextmanager
    def _inside(self, *, is_class: bool = False) -> Iterator[None]:
        outer, self._scope = self._scope, _Scope(self._scope, is_class=is_class)
        try:
            yield
        finally:
            self._scope = outer
