"""Every use of apex in a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from apex.tools.migrate.notes import OF_OPTIMIZERS
from apex.tools.migrate.script import ROOTS, Script, dotted, is_of_apex

OPTIMIZER = "optimizer."
"""Begins the names of what amp and apex's wrappers put on optimizers."""


@dataclass(frozen=True)
class Use:
    """One place that names something of apex.

    Attributes:
        name: In full, such as ``apex.amp.initialize``, or ``optimizer._amp_stash``.
        line: From 1.
        column: From 1.
        keywords: Those it is called with.
        quoted: Whether it is a string, as in configs and for ``import_module``.
    """

    name: str
    line: int
    column: int
    keywords: tuple[str, ...] = ()
    quoted: bool = False


def may_use_apex(text: str) -> bool:
    """Returns whether ``text`` is worth parsing."""
    return any(word in text for word in (*ROOTS, *OF_OPTIMIZERS))


def uses(script: Script) -> list[Use]:
    """Returns the uses in the order of the file; imports are uses, too."""
    visitor = _Visitor(script)
    script.module.visit(visitor)
    return sorted(visitor.found, key=lambda use: (use.line, use.column))


class _Visitor(cst.CSTVisitor):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.found: list[Use] = []
        self._calls: dict[cst.CSTNode, cst.Call] = {}

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802 - libcst's name
        for alias in node.names:
            name = dotted(alias.name)
            if name and is_of_apex(name):
                self._add(alias, name)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        module = dotted(node.module)
        if module and not node.relative and is_of_apex(module):
            if isinstance(node.names, cst.ImportStar):
                self._add(node, module)
            else:
                for alias in node.names:
                    self._add(alias, f"{module}.{dotted(alias.name)}")
        return False

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self._calls[node.func] = node

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        name = self.script.apex_name(node)
        if name is not None:
            self._add(node, name)
            return False
        if node.attr.value in OF_OPTIMIZERS:
            self._add(node.attr, OPTIMIZER + node.attr.value)
        return True

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        name = self.script.apex_name(node)
        # A bare module (`amp = None`, `apex is None`) says nothing that its import does not.
        if name is not None and name not in ROOTS:
            self._add(node, name)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802
        value = node.evaluated_value
        if isinstance(value, str) and is_of_apex(value) and _is_dotted(value):
            self._add(node, value, quoted=True)

    def _add(self, node: cst.CSTNode, name: str, *, quoted: bool = False) -> None:
        call = self._calls.get(node)
        keywords = tuple(_keywords(call)) if call else ()
        at = self.script
        self.found.append(Use(name, at.line(node), at.column(node), keywords, quoted))


def _is_dotted(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))


def _keywords(call: cst.Call) -> Iterator[str]:
    for argument in call.args:
        if argument.keyword is not None:
            yield argument.keyword.value
