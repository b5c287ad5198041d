"""Every use of apex in a script, by the imports that its names refer to, scope by scope."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from apex.tools.migrate.level_tests import levels_offered, levels_passing
from apex.tools.migrate.notes import OPTIMIZER_ATTRIBUTES

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""The top-level modules of this distribution."""

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


def uses(text: str) -> list[Use]:
    """Returns the uses in a script, imports included, in the order of the file.

    Raises:
        SyntaxError: If it is not valid in the running version of Python.
    """
    if not any(word in text for word in (*ROOTS, *OPTIMIZER_ATTRIBUTES)):  # not worth parsing
        return []
    visitor = _UseVisitor(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes are the script's concern
        visitor.visit(ast.parse(text))
    visitor.look_names_up()
    # A script without amp may have levels of its own.
    tests = visitor.tests if any(_is_of_apex(use.name) for use in visitor.found) else []
    return sorted(visitor.found + tests, key=lambda use: (use.line, use.column))


def _is_of_apex(name: str) -> bool:
    """Returns whether a full name is one of apex."""
    return name.partition(".")[0] in ROOTS


class _Scope:
    """The names bound in a module, class, function or comprehension."""

    def __init__(self, parent: _Scope | None = None, *, is_class: bool = False) -> None:
        self._is_class = is_class
        self.module: _Scope = self if parent is None else parent.module
        # Names of a class are not visible in its methods.
        self.enclosing: _Scope | None = (
            parent.enclosing if parent is not None and parent._is_class else parent
        )
        self._imports: dict[str, set[str]] = defaultdict(set)
        self._owners: dict[str, _Scope] = {}

    def bind(self, name: str, imported: str | None = None) -> None:
        """Binds ``name`` to an imported full name or, by default, to a local value."""
        self._owners.get(name, self)._imports[name].update([imported] if imported else [])

    def declare(self, names: Iterable[str], owner: _Scope) -> None:
        """Makes ``names`` refer to another scope, as ``global`` and ``nonlocal`` do."""
        self._owners.update(dict.fromkeys(names, owner))

    def apex_name(self, name: str) -> str | None:
        """Returns the full name of apex that ``name`` is imported from; ``None`` for others.

        If it has several imports (``try`` and ``except``), apex's wins.
        """
        scope: _Scope | None = self._owners.get(name, self)
        while scope is not None and name not in scope._imports:
            scope = scope.enclosing
        imports = set() if scope is None else scope._imports[name]
        return min(filter(_is_of_apex, imports), default=None)


class _UseVisitor(ast.NodeVisitor):
    """Visits a script.

    Attributes:
        found: The uses.
        tests: Tests of the opt level.
    """

    def __init__(self, text: str) -> None:
        self.found: list[Use] = []
        self.tests: list[Use] = []
        self._lines = re.split(r"\r\n|\r|\n", text)
        self._calls: dict[ast.expr, ast.Call] = {}
        self._scope = _Scope()
        # Those read; a name may be bound further down.
        self._names: list[tuple[ast.Name | ast.Attribute, _Scope]] = []

    def look_names_up(self) -> None:
        """Finds the uses among the names that the script reads; call it after the visit."""
        for name, scope in self._names:
            node: ast.expr = name
            attributes: list[ast.Attribute] = []
            while isinstance(node, ast.Attribute):
                attributes.insert(0, node)
                node = node.value
            root = scope.apex_name(node.id) if isinstance(node, ast.Name) else None
            if root is not None:
                full = ".".join([root, *(each.attr for each in attributes)])
                if full not in ROOTS:  # `apex is None` adds nothing to the import
                    self._add(name, full)
                continue
            for each in attributes:
                if each.attr in OPTIMIZER_ATTRIBUTES:
                    line, end = each.end_lineno or each.lineno, each.end_col_offset or 0
                    column = self._column(line, end) - len(each.attr)
                    keywords = self._keywords(each)
                    self.found.append(Use(OPTIMIZER + each.attr, line, column, keywords))

    # -- what names apex ---------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            self._scope.bind(alias.asname or package, alias.name if alias.asname else package)
            if _is_of_apex(alias.name):
                self._add(alias, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "" if node.level else node.module or ""  # a relative import is never apex's
        for alias in node.names:
            full = f"{module}.{alias.name}"
            self._scope.bind(alias.asname or alias.name, full)
            if _is_of_apex(full):
                self._add(*(node, module) if alias.name == "*" else (alias, full))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._names.append((node, self._scope))
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            self.visit(root)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._names.append((node, self._scope))
        else:
            self._scope.bind(node.id)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, str) and _is_of_apex(value) and _is_dotted(value):
            self._add(node, value, quoted=True)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for part in node.values:  # a constant part is not a full name
            if not isinstance(part, ast.Constant):
                self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        self._calls[node.func] = node
        self._add_test(node, levels_offered(node))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._add_test(node, levels_passing(node))
        self.generic_visit(node)

    # -- scopes ------------------------------------------------------------------------------

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.declare(node.names, self._scope.module)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._scope.declare(node.names, self._scope.enclosing or self._scope)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._scope.bind(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.bind(node.name)
        self._visit_nested(node, node.body, is_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scope.bind(node.name)
        self._visit_nested(node, node.body, node.args)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast names them

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_nested(node, [node.body], node.args)

    def visit_ListComp(self, node: ast.expr) -> None:
        self._visit_nested(node, [*ast.iter_child_nodes(node)])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def _visit_nested(
        self,
        node: ast.AST,
        body: Iterable[ast.AST],
        args: ast.arguments | None = None,
        *,
        is_class: bool = False,
    ) -> None:
        """Visits ``body`` in a scope of its own, the rest of ``node`` in the scope around."""
        inside = set(body)
        for child in ast.iter_child_nodes(node):  # decorators, defaults, annotations, bases
            if child not in inside:
                self.visit(child)
        outer, self._scope = self._scope, _Scope(self._scope, is_class=is_class)
        for arg in ast.walk(args) if args is not None else ():
            if isinstance(arg, ast.arg):
                self._scope.bind(arg.arg)
        for child in body:
            self.visit(child)
        self._scope = outer

    # -- uses --------------------------------------------------------------------------------

    def _add(
        self, node: ast.expr | ast.stmt | ast.alias, name: str, *, quoted: bool = False
    ) -> None:
        column = self._column(node.lineno, node.col_offset)
        self.found.append(Use(name, node.lineno, column, self._keywords(node), quoted))

    def _add_test(self, node: ast.expr, passing: frozenset[str] | None) -> None:
        if passing is not None:
            column = self._column(node.lineno, node.col_offset)
            self.tests.append(Use(ast.unparse(node), node.lineno, column, passing=passing))

    def _column(self, line: int, offset: int) -> int:
        """Returns the column, in characters from 1, of a byte offset in a line."""
        return len(self._lines[line - 1].encode()[:offset].decode()) + 1

    def _keywords(self, node: ast.AST) -> tuple[str, ...]:
        call = self._calls.get(node) if isinstance(node, ast.expr) else None
        return tuple(each.arg for each in call.keywords if each.arg) if call else ()


def _is_dotted(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))
