"""Changes of a tree, statement by statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from apex.tools.migrate.to_torch.regions import Region


@dataclass
class Edits:
    """What is to change. The nodes are those of the tree as read.

    Attributes:
        expressions: What replaces an expression, as source.
        statements: What replaces a statement, as source; no lines take it away.
        before: Lines to put before a statement.
        regions: Statements to put under a ``with``, and its head as source.
        aliases: Imported names to take away.
    """

    expressions: dict[cst.CSTNode, str] = field(default_factory=dict)
    statements: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    before: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    regions: list[tuple[Region, str]] = field(default_factory=list)
    aliases: set[cst.CSTNode] = field(default_factory=set)


def edited(module: cst.Module, edits: Edits) -> cst.Module:
    """Returns the changed tree; comments and layout of what stays are kept."""
    return module.visit(_Editor(module, edits))


class _Editor(cst.CSTTransformer):
    def __init__(self, module: cst.Module, edits: Edits) -> None:
        super().__init__()
        self._config = module.config_for_parsing
        self._edits = edits
        self._regions: Mapping[tuple[cst.CSTNode, int], tuple[Region, str]] = {
            (region.suite, region.first): (region, head) for region, head in edits.regions
        }

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Replaces expressions, and rebuilds suites, whose statements are all visited by then."""
        updated: Any = super().on_leave(original_node, updated_node)
        if original_node in self._edits.expressions:
            return cst.parse_expression(self._edits.expressions[original_node], config=self._config)
        if isinstance(original_node, cst.IndentedBlock):
            body = self._suite(original_node, updated.body)
            return updated.with_changes(body=body or self._parsed("pass"))
        if isinstance(original_node, cst.Module):
            return updated.with_changes(body=self._suite(original_node, updated.body))
        if isinstance(original_node, cst.Import | cst.ImportFrom):
            return self._import(original_node, updated)
        return updated

    def _suite(self, original: cst.IndentedBlock | cst.Module, updated: Sequence[Any]) -> list[Any]:
        body: list[Any] = []
        index, gap = 0, ()
        while index < len(updated):
            region, head = self._regions.get((original, index), (None, ""))
            end = index if region is None else region.last
            statements = [
                statement
                for at in range(index, end + 1)
                for statement in self._statement(original.body[at], updated[at])
            ]
            statements = statements if region is None else [self._under(head, statements)]
            body += self._spaced(statements, gap)
            # The blank lines in front of what is gone separate its neighbours.
            gap = () if statements else updated[index].leading_lines
            index = end + 1
        return body

    def _spaced(self, statements: list[Any], gap: Sequence[cst.EmptyLine]) -> list[Any]:
        if not statements or statements[0].leading_lines or any(line.comment for line in gap):
            return statements
        return [statements[0].with_changes(leading_lines=gap), *statements[1:]]

    def _statement(self, original: cst.CSTNode, updated: Any) -> list[Any]:
        lines = self._edits.statements.get(original)
        kept = [updated] if lines is None else self._parsed(*lines)
        new = [*self._parsed(*self._edits.before.get(original, [])), *kept]
        if new and new[0] is not updated:  # blank lines and comments stay in front
            if new[-1] is updated:
                new[-1] = updated.with_changes(leading_lines=[])
            new[0] = new[0].with_changes(leading_lines=updated.leading_lines)
        return new

    def _under(self, head: str, statements: list[Any]) -> Any:
        (block,) = self._parsed(f"with {head}:\n    pass")
        first = statements[0]
        return block.with_changes(
            leading_lines=first.leading_lines,
            body=cst.IndentedBlock(body=[first.with_changes(leading_lines=[]), *statements[1:]]),
        )

    def _import(self, original: cst.Import | cst.ImportFrom, updated: Any) -> Any:
        if isinstance(original.names, cst.ImportStar):
            return updated
        kept = [
            new
            for old, new in zip(original.names, updated.names, strict=True)
            if old not in self._edits.aliases
        ]
        if len(kept) == len(original.names) or not kept:  # a statement without names goes whole
            return updated
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(names=kept)

    def _parsed(self, *lines: str) -> list[Any]:
        return [cst.parse_statement(line + "\n", config=self._config) for line in lines]
