"""One Python file, read with what its names mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import (
    CodeRange,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedName,
    QualifiedNameProvider,
    QualifiedNameSource,
)

ROOTS = ("apex", "amp_C", "apex_C")
"""The top-level modules of this distribution."""

Suite = cst.BaseSuite | cst.Module
"""A run of statements."""


class Script:
    """A parsed file.

    Attributes:
        path: Where it lies.
        text: Its source.
        module: Its tree; nodes of it are what the methods take.
    """

    def __init__(self, path: Path, text: str) -> None:
        """Parses ``text``.

        Raises:
            libcst.ParserSyntaxError: If it is not today's Python.
        """
        self.path = path
        self.text = text
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        found: Any = wrapper.resolve_many(
            [PositionProvider, ParentNodeProvider, QualifiedNameProvider]
        )
        self._positions: Mapping[cst.CSTNode, CodeRange] = found[PositionProvider]
        self._parents: Mapping[cst.CSTNode, cst.CSTNode] = found[ParentNodeProvider]
        self._names: Mapping[cst.CSTNode, Any] = found[QualifiedNameProvider]

    @cached_property
    def nodes(self) -> tuple[cst.CSTNode, ...]:
        """All nodes, each before its children."""
        return tuple(below(self.module))

    @cached_property
    def references(self) -> tuple[tuple[cst.CSTNode, str], ...]:
        """What names apex outside imports: the whole expression, and its full name."""
        inside: set[cst.CSTNode] = set()
        found: list[tuple[cst.CSTNode, str]] = []
        for node in self.nodes:
            if isinstance(node, cst.Import | cst.ImportFrom) or node in inside:
                inside.update(node.children)
            elif isinstance(node, cst.Attribute | cst.Name) and (name := self.apex_name(node)):
                found.append((node, name))
                inside.update(node.children)
        return tuple(found)

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line that ``node`` begins in, from 1."""
        return self._positions[node].start.line

    def column(self, node: cst.CSTNode) -> int:
        """Returns the column that ``node`` begins in, from 1."""
        return self._positions[node].start.column + 1

    def code(self, node: cst.CSTNode) -> str:
        """Returns the source of ``node``."""
        return self.module.code_for_node(node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields what ``node`` stands in, innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def apex_name(self, node: cst.CSTNode) -> str | None:
        """Returns the full name of ``node`` if it is apex's, such as ``apex.amp.initialize``.

        Aliases are followed; of several imports of one name (``try`` and ``except``) apex's counts.
        """
        if dotted(node) is None:  # what is called or indexed has a name of its own
            return None
        names = self._names.get(node) or ()
        names = names() if callable(names) else names
        return next(iter(sorted(name.name for name in names if _is_of_apex(name))), None)


def below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields ``node`` and all that is in it, each before its children."""
    yield node
    for child in node.children:
        yield from below(child)


def dotted(node: cst.CSTNode | None) -> str | None:
    """Returns ``self.model`` for that expression; None for one that is not a plain name."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr.value}"
    return None


def is_of_apex(name: str) -> bool:
    """Returns whether a full name is one of apex."""
    return name.partition(".")[0] in ROOTS


def _is_of_apex(name: QualifiedName) -> bool:
    return name.source is QualifiedNameSource.IMPORT and is_of_apex(name.name)
