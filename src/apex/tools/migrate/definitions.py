"""Finds where this package defines a name, in its source, because importing it is slow."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from apex.tools.source import Imported, bound_by, of_scope

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""The top-level modules of this distribution."""

SITE = Path(__file__).parents[3]
"""The folder that contains them."""


class Definition(NamedTuple):
    """The object that a full name refers to.

    Attributes:
        module: The module that defines it, or another library's full name.
        name: Its name in the module; empty for a module or another library's name.
        node: The node that binds it there; None if none in the source does.
    """

    module: str
    name: str = ""
    node: ast.AST | None = None


def is_of_apex(name: str) -> bool:
    """Returns whether a full name begins with a module of this distribution."""
    return name.partition(".")[0] in ROOTS


def definition_of(name: str) -> Definition:
    """Returns the definition of a full name; for an object's attribute, the object's."""
    module, *parts = name.split(".")
    while parts and is_of_apex(module):
        part = parts.pop(0)
        bound = bindings(module).get(part)
        if isinstance(bound, ast.AST):
            return Definition(module, part, bound)
        submodule = f"{module}.{part}"
        if isinstance(bound, Imported) and bound != (module, part):
            module = bound.module
            if bound.name:
                parts.insert(0, bound.name)
        elif _file(submodule) is not None:
            module = submodule
        else:
            return Definition(module, part)
    return Definition(".".join([module, *parts]))


@cache
def bindings(module: str) -> Mapping[str, ast.AST | Imported]:
    """Returns the names that a module of this distribution binds, and their objects."""
    bound: dict[str, ast.AST | Imported] = {}
    file = _file(module)
    if file is not None:
        for node in of_scope(ast.parse(file.read_bytes())):
            bound.update(bound_by(node))
    return bound


def _file(module: str) -> Path | None:
    path = SITE.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def parameters(definition: Definition) -> list[str] | None:
    """Returns the names of a function's or a class's arguments; None if any name is accepted."""
    node = definition.node
    if isinstance(node, ast.FunctionDef):
        if node.args.kwarg is not None:
            return None
        arguments = [*node.args.args, *node.args.kwonlyargs]
        return [argument.arg for argument in arguments if argument.arg != "self"]
    if not isinstance(node, ast.ClassDef):
        return None
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return parameters(Definition(definition.module, "__init__", statement))
    if len(node.bases) != 1:
        return None
    base = ast.unparse(node.bases[0])
    return parameters(definition_of(f"{definition.module}.{base}"))
