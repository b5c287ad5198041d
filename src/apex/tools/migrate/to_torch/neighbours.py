"""Files beside a script that it imports: they share amp's session with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from apex.tools.migrate.script import Script, dotted
from apex.tools.migrate.sources import UnreadableError, read
from apex.tools.migrate.to_torch.flow import uses_amp


@dataclass(frozen=True)
class Neighbour:
    """An imported file that uses amp.

    Attributes:
        line: That of the import.
        path: The file's, resolved.
    """

    line: int
    path: Path


def neighbours(script: Script) -> list[Neighbour]:
    """Returns the files that ``script`` imports, by the folders they lie in, and that use amp."""
    found = {
        path.resolve(): script.line(node)
        for node in script.nodes
        if isinstance(node, cst.Import | cst.ImportFrom)
        for path in _files(script.path.parent, node)
    }
    return [Neighbour(line, path) for path, line in found.items() if _shares(path)]


def _files(folder: Path, node: cst.Import | cst.ImportFrom) -> Iterator[Path]:
    for module in _modules(node):
        base = folder
        for _ in node.relative[1:] if isinstance(node, cst.ImportFrom) else ():
            base = base.parent
        path = base.joinpath(*module.split("."))
        yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


def _modules(node: cst.Import | cst.ImportFrom) -> list[str]:
    names = (
        [] if isinstance(node.names, cst.ImportStar) else [str(dotted(a.name)) for a in node.names]
    )
    if isinstance(node, cst.Import):
        return names
    module = dotted(node.module)
    return [module, *(f"{module}.{name}" for name in names)] if module else names


def _shares(path: Path) -> bool:
    try:
        text = read(path)
        return "apex" in text and uses_amp(Script(path, text))
    except (UnreadableError, cst.ParserSyntaxError):
        return False
