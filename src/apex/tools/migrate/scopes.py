"""The imports that the names of a Python file refer to, scope by scope."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Scope:
    """The names bound in a module, class, function or comprehension."""

    def __init__(self, parent: Scope | None = None, *, is_class: bool = False) -> None:
        self.parent = parent
        self.is_class = is_class
        self._imports: dict[str, set[str]] = defaultdict(set)
        self._owners: dict[str, Scope] = {}

    def bind(self, name: str, imported: str | None = None) -> None:
        """Binds ``name`` to an imported full name or, by default, to a local value."""
        self._owners.get(name, self)._imports[name].update([imported] if imported else [])

    def declare(self, name: str, owner: Scope) -> None:
        """Makes ``name`` refer to another scope, as ``global`` and ``nonlocal`` do."""
        self._owners[name] = owner

    def imports_of(self, name: str) -> set[str]:
        """Returns the full names that ``name`` is imported from; empty for a local value."""
        scope: Scope | None = self._owners.get(name, self)
        while scope is not None and name not in scope._imports:
            scope = scope.enclosing
        return set() if scope is None else scope._imports[name]

    @property
    def enclosing(self) -> Scope | None:
        """The next scope that Python searches; names of a class are not visible in its methods."""
        scope = self.parent
        while scope is not None and scope.is_class:
            scope = scope.parent
        return scope

    @property
    def module(self) -> Scope:
        """The outermost scope."""
        return self if self.parent is None else self.parent.module


class ScopeVisitor(ast.NodeVisitor):
    """Finds the scope of every name in a module.

    Attributes:
        scopes: The scope that each name is looked up in.
    """

    def __init__(self) -> None:
        self.scopes: dict[ast.Name, Scope] = {}
        self._scope = Scope()

    def visit_Name(self, node: ast.Name) -> None:
        """Records a name, and binds it where it is assigned."""
        self.scopes[node] = self._scope
        if not isinstance(node.ctx, ast.Load):
            self._scope.bind(node.id)

    def visit_Import(self, node: ast.Import) -> None:
        """Binds each alias, or the top-level package."""
        for alias in node.names:
            package = alias.name.partition(".")[0]
            self._scope.bind(alias.asname or package, alias.name if alias.asname else package)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Binds each name; those of relative imports are never apex's."""
        for alias in node.names:
            full = None if node.level else f"{node.module}.{alias.name}"
            self._scope.bind(alias.asname or alias.name, full)

    def visit_Global(self, node: ast.Global) -> None:
        """Declares the names in the module."""
        for name in node.names:
            self._scope.declare(name, self._scope.module)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        """Declares the names in the enclosing function."""
        for name in node.names:
            self._scope.declare(name, self._scope.enclosing or self._scope)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Binds the exception."""
        if node.name:
            self._scope.bind(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visits the body in a new scope."""
        self._scope.bind(node.name)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._inside(is_class=True):
            self._visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visits the body in a new scope with the arguments bound."""
        self._scope.bind(node.name)
        self._visit_all(node.decorator_list)
        self._visit_function(node.args, [*([node.returns] if node.returns else [])], node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast names them

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Visits the body in a new scope with the arguments bound."""
        self._visit_function(node.args, [], [node.body])

    def visit_ListComp(self, node: ast.expr) -> None:
        """Visits a comprehension in a new scope."""
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
        outer, self._scope = self._scope, Scope(self._scope, is_class=is_class)
        try:
            yield
        finally:
            self._scope = outer
