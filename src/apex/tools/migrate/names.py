"""Finds the uses of apex in a script, whatever names the script imports them by."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from apex.tools.migrate.definitions import (
    bindings,
    definition_of,
    is_of_apex,
    parameters,
)
from apex.tools.migrate.notes import (
    GONE,
    LOCAL_RANK,
    OPTIMIZER,
    OPTIMIZERS,
    REQUIRED,
    STEP,
    VIEW,
    WRAPPED,
    nearest,
)
from apex.tools.source import Imported, bound_by, of_scope


class Name(NamedTuple):
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
    values: Mapping[str, Any] = {}


def names(tree: ast.Module) -> list[Name]:
    """Returns the names of apex in a script, imports included, in the order of its lines.

    Also returns what is gone or changed in other libraries.
    """
    visitor = _Visitor(tree)
    visitor.visit(tree)
    uses = visitor.uses
    classes = {use.name for use in uses if use.name.endswith(".FusedAdam")}
    if classes != {"apex.optimizers.FusedAdam"}:  # contrib's still takes gradients
        uses = [use for use in uses if use.name != STEP]
    return sorted(uses, key=lambda use: use.line)


_WRAPPED_MODEL = "DataParallel()"
"""The full name of models that are wrapped for parallel training."""


class _Visitor(ast.NodeVisitor):
    """Visits a script and collects the names of apex.

    A name refers to apex if the script imports it from apex anywhere, except in functions that bind
    it to something else.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[Name] = []
        self._full_names = _full_names(ast.walk(tree))
        # The call of each function.
        self._calls: dict[ast.expr, ast.Call] = {}

    def _add(self, name: str, node: ast.expr) -> None:
        keywords = self._keywords_of(name, node)
        names = [keyword.arg for keyword in keywords]
        values: dict[Any, Any] = {}
        for keyword in keywords:
            with contextlib.suppress(ValueError):  # not a literal
                values[keyword.arg] = ast.literal_eval(keyword.value)
        if None in names:  # as in ``**options``, which may hold any
            values = {}
        self.uses.append(Name(name, node.lineno, tuple(filter(None, names)), values))

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
        self._full_names = outer | _full_names(of_scope(node))
        self.generic_visit(node)
        self._full_names = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        prefix = ""
        if isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + f"{node.module}."
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
                before = self._full_names.get(target.id)
                # As in `amp = apex.amp`. Any other value leaves an import's name as it is.
                if is_of_apex(full_name) or _WRAPPED_MODEL in (full_name, before):
                    self._full_names[target.id] = full_name

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
        options = [value.value for value in node.args if isinstance(value, ast.Constant)]
        if LOCAL_RANK in options and "--local-rank" not in options:
            yield LOCAL_RANK
        function = self._full_name(node.func)
        required = REQUIRED.get(function)
        by_position = function == "yaml.load" and len(node.args) > 1
        if required and not by_position and not keywords & {required, None}:
            yield f"{function}()"
        for keyword in node.keywords:
            argument = f"{function}({keyword.arg})"
            match keyword:
                case ast.keyword("verbose") | ast.keyword(
                    "betas", ast.Tuple([ast.Constant(int()), _] | [_, ast.Constant(int())])
                ):
                    if argument in GONE:
                        yield argument
        models = map(self._full_name, node.args[:1])
        if function == "apex.amp.initialize" and _WRAPPED_MODEL in models:
            yield WRAPPED

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
        match node:
            case ast.Name():
                return self._full_names.get(node.id, "")
            case ast.Attribute():
                owner = self._full_name(node.value)
                if owner:
                    return f"{owner}.{node.attr}"
            case ast.Call():
                name = self._full_name(node.func)
                if name.endswith(("DataParallel", "DataParallel().cuda", "DataParallel().to")):
                    return _WRAPPED_MODEL
        return ""


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
            if name == "*":
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
