"""Where this package defines a name, read from its source: importing it takes a second."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from apex.tools.source import Imported, bound_by, imported_by, of_scope

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""The top-level modules of this distribution."""

SITE = Path(__file__).parents[3]
"""The folder that holds them."""


class Definition(NamedTuple):
    """What a full name stands for.

    Attributes:
        module: The module that defines it, or another library's full name.
        name: Its name in the module; empty for a module or another library's name.
        node: What binds it there; None if nothing in the source does.
    """

    module: str
    name: str = ""
    node: ast.AST | None = None

    @property
    def is_missing(self) -> bool:
        """Whether nothing in the module's source binds the name."""
        return self.node is None and self.name != ""


def is_of_apex(name: str) -> bool:
    """Returns whether a full name is of a module of this distribution."""
    return name.partition(".")[0] in ROOTS


def definition_of(name: str) -> Definition:
    """Returns the definition of a full name; of an object's attribute, the object's."""
    module, *parts = name.split(".")
    return _find(module, parts)


def _find(module: str, parts: list[str]) -> Definition:
    if not is_of_apex(module):
        return Definition(".".join([module, *parts]))
    if not parts:
        return Definition(module)
    part, *rest = parts
    bound = bindings(module).get(part)
    if isinstance(bound, Imported) and bound != (module, part):
        return _find(bound.module, [bound.name, *rest] if bound.name else rest)
    if isinstance(bound, ast.AST):
        return Definition(module, part, bound)
    inner = f"{module}.{part}"
    return Definition(module, part) if _file(inner) is None else _find(inner, rest)


@cache
def bindings(module: str) -> Mapping[str, ast.AST | Imported]:
    """Returns the names that a module of this distribution binds, with what binds or holds them."""
    file = _file(module)
    if file is None:
        return {}
    bound: dict[str, ast.AST | Imported] = {}
    for node in of_scope(ast.parse(file.read_bytes())):
        bound.update(imported_by(node))
        if not isinstance(node, ast.alias):
            bound[bound_by(node) or ""] = node
    return bound


def _file(module: str) -> Path | None:
    path = SITE.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def parameters(definition: Definition) -> frozenset[str] | None:
    """Returns the names of a function's or a class's arguments; None if any name is accepted."""
    node = definition.node
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        if arguments.kwarg is not None:
            return None
        listed = [*arguments.args, *arguments.kwonlyargs]
        return frozenset(argument.arg for argument in listed)
    if not isinstance(node, ast.ClassDef) or len(node.bases) > 1:
        return None
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return parameters(Definition(definition.module, "__init__", statement))
    for base in node.bases:
        return parameters(definition_of(f"{definition.module}.{ast.unparse(base)}"))
    return None
