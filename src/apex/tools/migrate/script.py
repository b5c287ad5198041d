"""One parsed Python file."""

from __future__ import annotations

import ast
import re
import warnings

from apex.tools.migrate.scopes import ScopeVisitor

ROOTS = ("apex", "amp_C", "apex_C", "fused_adam_cuda")
"""The top-level modules of this distribution."""


class Script:
    """A parsed file.

    Attributes:
        module: Its syntax tree; the methods take its nodes.
    """

    def __init__(self, text: str) -> None:
        """Parses ``text``.

        Raises:
            SyntaxError: If it is not valid in the running version of Python.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the script's concern
            self.module = ast.parse(text)
        self._lines = re.split(r"\r\n|\r|\n", text)
        visitor = ScopeVisitor()
        visitor.visit(self.module)
        self._scopes = visitor.scopes

    def column(self, line: int, offset: int) -> int:
        """Returns the column, in characters from 1, of a byte offset in a line."""
        return len(self._lines[line - 1].encode()[:offset].decode()) + 1

    def apex_name(self, node: ast.expr) -> str | None:
        """Returns the full name of ``node`` if it is apex's, such as ``apex.amp.initialize``.

        Aliases are resolved. If a name has several imports (``try`` and ``except``), apex's wins.
        """
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        found = sorted(filter(is_of_apex, self._scopes[node].imports_of(node.id)))
        return ".".join([found[0], *attributes]) if found else None


def is_of_apex(name: str) -> bool:
    """Returns whether a full name is one of apex."""
    return name.partition(".")[0] in ROOTS
