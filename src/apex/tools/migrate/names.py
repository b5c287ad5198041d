"""Finds the uses of apex in a script, whatever names the script imports them by."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apex.tools.migrate.definitions import ROOTS, is_of_apex
from apex.tools.migrate.notes import (
    CHANGED,
    LOCAL_RANK,
    OPTIMIZER,
    OPTIMIZERS,
    STEP,
    VIEW,
    WRAPPED,
    gone,
)
from apex.tools.source import Imported, bound_by, of_scope


@dataclass(frozen=True)
class Name:
    """A full name of apex in a script, such as ``apex.amp.initialize`` or ``optimizer._amp_stash``.

    Attributes:
        name: The name.
        line: From 1.
        keywords: Keyword arguments of the call.
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
    uses = visitor.uses
    if any(use.name == "apex.optimizers.FusedAdam" for use in uses):
        uses += visitor.steps
    if not visitor.accepts_local_rank:
        uses += visitor.local_ranks
    return sorted(uses, key=lambda name: name.line)


class _Visitor(ast.NodeVisitor):
    """Visits a script and collects the names of apex.

    A name refers to apex if the script imports it from apex anywhere, except in functions that bind
    it to something else.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[Name] = []
        # Calls of ``step`` with arguments of apex's first FusedAdam.
        self.steps: list[Name] = []
        self.local_ranks: list[Name] = []
        self.accepts_local_rank = False
        # Variables that hold a model wrapped for parallel training.
        self._wrapped: set[str] = set()
        self._full_names = _full_names(ast.walk(tree))
        # The call of each function.
        self._calls: dict[ast.expr, ast.Call] = {}

    def _add(self, name: str, node: ast.expr) -> None:
        if name in ROOTS:  # as in `apex is None`
            return
        line = node.end_lineno or node.lineno
        arguments = {}
        if node in self._calls:
            arguments = {keyword.arg: keyword.value for keyword in self._calls[node].keywords}
        elif name == "torch.load":  # passed on, or imported
            return
        if name == "torch.load" and "weights_only" in arguments:
            return
        values = {}
        for keyword, value in arguments.items():
            with contextlib.suppress(ValueError):  # not a literal
                if keyword is not None:
                    values[keyword] = ast.literal_eval(value)
        if None in arguments:  # as in ``**options``, which may hold any
            values = {}
        keywords = tuple(filter(None, arguments))
        self.uses.append(Name(name, line, keywords, values))

    def _visit_function(self, node: Any) -> None:
        outer = self._full_names
        wrapped = self._wrapped
        self._full_names = outer | _full_names(of_scope(node))
        self._wrapped = set()
        self.generic_visit(node)
        self._full_names = outer
        self._wrapped = wrapped

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_noted(alias.name):
                self.uses.append(Name(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            return
        for alias in node.names:
            full_name = module if alias.name == "*" else f"{module}.{alias.name}"
            if _is_noted(full_name) and full_name != "torch.load":
                self.uses.append(Name(full_name, alias.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._wrapped.discard(target.id)
                if self._wraps(node.value):
                    self._wrapped.add(target.id)

    def visit_Call(self, node: ast.Call) -> None:
        self._calls[node.func] = node
        if _views_a_slice(node):
            self.uses.append(Name(VIEW, node.lineno))
        if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            for keyword in node.keywords:
                if keyword.arg in ("grads", "output_params", "scale", "grad_norms"):
                    self.steps.append(Name(STEP, node.lineno))
                    break
        is_initialize = self._full_name(node.func) == "apex.amp.initialize"
        if is_initialize and node.args and self._wraps(node.args[0]):
            self.uses.append(Name(WRAPPED, node.lineno))
        self.generic_visit(node)

    def _wraps(self, node: ast.expr) -> bool:
        """Returns whether an expression is a model wrapped for parallel training."""
        if isinstance(node, ast.Name):
            return node.id in self._wrapped
        if not isinstance(node, ast.Call):
            return False
        return self._full_name(node.func).endswith(("DataParallel", ".DistributedDataParallel"))

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value == LOCAL_RANK:
            self.local_ranks.append(Name(LOCAL_RANK, node.lineno))
        elif node.value == "--local-rank":
            self.accepts_local_rank = True

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
    for node in nodes:
        for name, bound in bound_by(node):
            if isinstance(bound, Imported) and is_of_apex(bound.module):
                full_names[name] = str(bound)
            elif isinstance(bound, Imported) and bound.module:
                full_names.setdefault(name, str(bound))
            else:
                full_names.setdefault(name, "")
    return full_names


def _is_noted(name: str) -> bool:
    """Returns whether a full name is of apex, or is gone or changed in another library."""
    return is_of_apex(name) or name in CHANGED or gone(name) != ""


def _views_a_slice(call: ast.Call) -> bool:
    """Returns whether a call is ``x[:k].view(-1)``."""
    match call.func:
        case ast.Attribute(attr="view", value=ast.Subscript(slice=ast.Slice())):
            return [ast.unparse(argument) for argument in call.args] == ["-1"]
    return False
