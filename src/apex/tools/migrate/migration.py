"""The uses of apex below a path, each with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from libcst import ParserSyntaxError

from apex.tools.migrate.script import Script
from apex.tools.migrate.sources import UnreadableError, python_files, read
from apex.tools.migrate.uses import Use, may_use_apex, uses
from apex.tools.migrate.verdicts import Kind, Verdict, is_known, verdict_of_use

Unread = Callable[[Path, str], None]
"""Is told the path and why it was not read."""


@dataclass(frozen=True)
class ScriptUses:
    """The uses in one file, in order."""

    path: Path
    uses: tuple[tuple[Use, Verdict], ...]


@dataclass(frozen=True)
class Migration:
    """What a path uses of apex.

    Attributes:
        scripts: Those that mention apex.
        unread: Files that could not be read or parsed, and why.
        files: How many were looked at.
    """

    scripts: tuple[ScriptUses, ...]
    unread: tuple[tuple[Path, str], ...]
    files: int

    @property
    def failed(self) -> bool:
        """Whether something is not supported, or was not read."""
        verdicts = (verdict for script in self.scripts for _, verdict in script.uses)
        return bool(self.unread) or any(v.kind is Kind.NOT_SUPPORTED for v in verdicts)


def migration_of(path: Path) -> Migration:
    """Returns the uses of apex in a file, or in all Python files below a folder.

    Raises:
        UnreadableError: If the path itself cannot be read.
    """
    files = python_files(path)
    if files == [path]:
        read(path)
    unread: list[tuple[Path, str]] = []
    found = [
        ScriptUses(script.path, tuple((use, verdict_of_use(use)) for use in _known(script)))
        for script in scripts(files, lambda *reason: unread.append(reason))
    ]
    return Migration(tuple(found), tuple(unread), len(files))


def _known(script: Script) -> Iterator[Use]:
    """Yields the uses; of strings those only that name something of apex."""
    return (use for use in uses(script) if not use.quoted or is_known(use.name))


def scripts(files: list[Path], unread: Unread) -> Iterator[Script]:
    """Yields the files that may use apex, parsed."""
    for file in files:
        if (script := _script(file, unread)) is not None:
            yield script


def _script(file: Path, unread: Unread) -> Script | None:
    try:
        text = read(file)
        return Script(file, text) if may_use_apex(text) else None
    except UnreadableError as error:
        unread(file, str(error))
    except ParserSyntaxError as error:
        unread(file, f"line {error.raw_line}: not the syntax of Python 3.")
    return None
