"""Where a node stands: its statement, the statements around it, its function and class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from apex.tools.migrate.script import Script, below, dotted

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Function = cst.FunctionDef | None
"""A function, or None for the module's own level."""


def statement_of(script: Script, node: cst.CSTNode) -> Statement:
    """Returns the innermost statement with ``node`` in it that stands in a suite of its own."""
    for each in (node, *script.parents(node)):
        if isinstance(each, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            return each
    raise ValueError("The node stands in no statement.")


def suite_of(script: Script, statement: Statement) -> cst.BaseSuite | cst.Module:
    """Returns the suite that ``statement`` is a direct part of."""
    parent = next(script.parents(statement))
    if isinstance(parent, cst.BaseSuite | cst.Module):
        return parent
    raise ValueError("The statement stands in no suite.")


def body_of(suite: cst.BaseSuite | cst.Module) -> Sequence[cst.CSTNode]:
    """Returns the statements of a suite."""
    return suite.body


def ancestor_in(script: Script, node: cst.CSTNode, suite: cst.CSTNode) -> Statement | None:
    """Returns the direct statement of ``suite`` that holds ``node``; None if it is not inside."""
    below_it = node
    for parent in script.parents(node):
        if parent is suite:
            return below_it  # type: ignore[return-value]  # a suite holds statements
        below_it = parent
    return None


def is_in(script: Script, node: cst.CSTNode, container: cst.CSTNode) -> bool:
    """Returns whether ``node`` is ``container`` or inside it."""
    return node is container or any(parent is container for parent in script.parents(node))


def functions_of(script: Script, node: cst.CSTNode) -> Iterator[cst.FunctionDef]:
    """Yields the functions that ``node`` is in the body of, innermost first."""
    for parent in script.parents(node):
        if isinstance(parent, cst.FunctionDef):
            yield parent


def function_of(script: Script, node: cst.CSTNode) -> Function:
    """Returns the function that ``node`` stands in."""
    return next(functions_of(script, node), None)


def class_of(script: Script, node: cst.CSTNode) -> cst.ClassDef | None:
    """Returns the class that ``node`` stands in."""
    return next((p for p in script.parents(node) if isinstance(p, cst.ClassDef)), None)


def parameters(function: cst.FunctionDef) -> list[str]:
    """Returns the names of the parameters in order: positional ones, then keyword-only ones."""
    params = function.params
    every = (*params.posonly_params, *params.params, *params.kwonly_params)
    return [param.name.value for param in every]


def assigned(node: cst.CSTNode) -> set[str]:
    """Returns the plain names that are assigned in ``node``: also ``self.loss`` and the like."""
    targets: list[cst.CSTNode] = []
    for each in below(node):
        if isinstance(each, cst.Assign):
            targets += [target.target for target in each.targets]
        elif isinstance(each, cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr):
            targets.append(each.target)
        elif isinstance(each, cst.AsName):
            targets.append(each.name)
    return {name for target in targets for name in _names_in(target)}


def read(node: cst.CSTNode) -> set[str]:
    """Returns the plain names in ``node``, and each's beginnings: ``self.loss`` gives ``self``."""
    return {name for each in below(node) if (name := dotted(each)) is not None}


def describe(function: Function) -> str:
    """Returns how messages call the place."""
    return f"{function.name.value}()" if function else "the module"


def _names_in(target: cst.CSTNode) -> Iterator[str]:
    if isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from _names_in(element.value)
    elif isinstance(target, cst.Subscript):
        yield from _names_in(target.value)
    elif (name := dotted(target)) is not None:
        yield name
