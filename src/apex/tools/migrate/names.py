"""Finds the uses of apex in a script, whatever names the script imports them by."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from apex.tools.migrate.definitions import (
    ROOTS,
    bindings,
    definition_of,
    is_of_apex,
    parameters,
)
from apex.tools.migrate.notes import (
    GONE,
    LOAD,
    LOCAL_RANK,
    OPTIMIZER,
    OPTIMIZERS,
    STEP,
    VIEW,
    WRAPPED,
    nearest,
)
from apex.tools.source import Imported, bound_by, of_scope


@dataclass(frozen=True)
class Name:
    """A full name of apex in a script, such as ``apex.amp.initialize`` or ``optimizer._amp_stash``.

    Attributes:
        name: The name.
        line: From 1.
        keywords: Names of the call's arguments, but for a first one by position.
        values: The values of those that are literals.
    """

    name: str
    line: int
    keywords: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


def is_worth_parsing(text: str) -> bool:
    """Returns whether a source may use apex, or what old scripts use beside it."""
    words = [name.removeprefix(OPTIMIZER) for name in (*ROOTS, *OPTIMIZERS)]
    words += ["torch", "numpy", "collections"]
    return any(word in text for word in words)


def names(tree: ast.Module) -> list[Name]:
    """Returns the names of apex in a script, imports included, in the order of its lines.

    Also returns what is gone or changed in other libraries.
    """
    visitor = _Visitor(tree)
    visitor.visit(tree)
    found = {use.name for use in visitor.uses}
    ignored = {_ACCEPTED}
    if "apex.optimizers.FusedAdam" not in found:
        ignored.add(STEP)
    if _ACCEPTED in found:
        ignored.add(LOCAL_RANK)
    uses = [use for use in visitor.uses if use.name not in ignored]
    return sorted(uses, key=lambda use: use.line)


_ACCEPTED = "--local-rank"
"""The argument that replaces ``LOCAL_RANK``."""


class _Visitor(ast.NodeVisitor):
    """Visits a script and collects the names of apex.

    A name refers to apex if the script imports it from apex anywhere, except in functions that bind
    it to something else.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[Name] = []
        # Variables that hold a model wrapped for parallel training.
        self._wrapped: set[str] = set()
        self._full_names = _full_names(ast.walk(tree))
        # The call of each function.
        self._calls: dict[ast.expr, ast.Call] = {}

    def _add(self, name: str, node: ast.expr) -> None:
        if name in ROOTS:  # as in `apex is None`
            return
        keywords = self._keywords_of(name, node)
        names = [keyword.arg for keyword in keywords]
        values: dict[Any, Any] = {}
        for keyword in keywords:
            with contextlib.suppress(ValueError):  # not a literal
                values[keyword.arg] = ast.literal_eval(keyword.value)
        if None in names:  # as in ``**options``, which may hold any
            values = {}
        line = node.end_lineno or node.lineno
        self.uses.append(Name(name, line, tuple(filter(None, names)), values))

    def _keywords_of(self, name: str, node: ast.expr) -> list[ast.keyword]:
        """Returns a call's arguments by name, but for a first one by position: an object."""
        call = self._calls.get(node)
        if call is None:
            return []
        keywords = [*call.keywords]
        accepted = parameters(definition_of(name)) or []
        for position, value in enumerate(call.args):
            if isinstance(value, ast.Starred):
                keywords.append(ast.keyword(None, value))
            elif 0 < position < len(accepted):
                keywords.append(ast.keyword(accepted[position], value))
        return keywords

    def _visit_function(self, node: Any) -> None:
        outer = self._full_names
        wrapped = self._wrapped
        self._full_names = outer | _full_names(of_scope(node))
        self._wrapped = set()
        self.generic_visit(node)
        self._full_names = outer
        self._wrapped = wrapped

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        prefix = ""
        if isinstance(node, ast.ImportFrom):
            if node.level:
                return
            prefix = f"{node.module}."
        for alias in node.names:
            full_name = f"{prefix}{alias.name}".removesuffix(".*")
            if _is_noted(full_name):
                self.uses.append(Name(full_name, alias.lineno))

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        full_name = self._full_name(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                if is_of_apex(full_name):  # as in ``amp = apex.amp``
                    self._full_names[target.id] = full_name
                self._wrapped.discard(target.id)
                if self._wraps(node.value):
                    self._wrapped.add(target.id)

    def visit_Call(self, node: ast.Call) -> None:
        self._calls[node.func] = node
        self.uses += [Name(call, node.lineno) for call in self._noted_calls(node)]
        self.generic_visit(node)

    def _noted_calls(self, node: ast.Call) -> Iterator[str]:
        """Yields the notes' names for a call that fails or changed because of its arguments."""
        keywords = {keyword.arg for keyword in node.keywords}
        match node:
            case ast.Call(
                ast.Attribute(ast.Subscript(slice=ast.Slice()), "view"),
                [ast.UnaryOp(ast.USub(), ast.Constant(1))],
            ):
                yield VIEW
            case ast.Call(ast.Attribute(attr="step")):
                if keywords & {"grads", "output_params", "scale", "grad_norms"}:
                    yield STEP
        function = self._full_name(node.func)
        if function == LOAD and "weights_only" not in keywords:
            yield LOAD
        if function == "apex.amp.initialize" and any(map(self._wraps, node.args[:1])):
            yield WRAPPED

    def _wraps(self, node: ast.expr) -> bool:
        """Returns whether an expression is a model wrapped for parallel training."""
        if isinstance(node, ast.Name):
            return node.id in self._wrapped
        if not isinstance(node, ast.Call):
            return False
        return self._full_name(node.func).endswith("DataParallel")

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in (LOCAL_RANK, _ACCEPTED):
            self.uses.append(Name(str(node.value), node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full_name = self._full_name(node)
        if _is_noted(full_name):
            self._add(full_name, node)
            return
        self.visit(node.value)
        attribute = OPTIMIZER + node.attr
        if attribute in OPTIMIZERS:
            self._add(attribute, node)

    def visit_Name(self, node: ast.Name) -> None:
        full_name = self._full_name(node)
        if _is_noted(full_name) and isinstance(node.ctx, ast.Load):
            self._add(full_name, node)

    def _full_name(self, node: ast.expr) -> str:
        """Returns the full name of an expression such as ``amp.init``; empty without an import."""
        if isinstance(node, ast.Name):
            return self._full_names.get(node.id, "")
        if not isinstance(node, ast.Attribute):
            return ""
        owner = self._full_name(node.value)
        if not owner:
            return ""
        return f"{owner}.{node.attr}"


def _full_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Returns the names that nodes bind: imported ones with their full names, others with ``""``.

    If there are several imports (``try`` and ``except``), apex's wins.
    """
    full_names = {}
    from_stars: dict[str, str] = {}
    for node in nodes:
        for name, bound in bound_by(node):
            full_name = ""
            if isinstance(bound, Imported) and bound.module:
                full_name = str(bound)
            if name == "*" and is_of_apex(full_name):
                module = full_name.removesuffix(".*")
                from_stars |= {public: f"{module}.{public}" for public in bindings(module)}
            elif is_of_apex(full_name):
                full_names[name] = full_name
            else:
                full_names.setdefault(name, full_name)
    return from_stars | full_names


def _is_noted(name: str) -> bool:
    """Returns whether a full name is of apex, or is gone in another library."""
    return is_of_apex(name) or nearest(name, GONE) != ""
