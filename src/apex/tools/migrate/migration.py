"""The uses of apex below a path, each with its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from libcst import ParserSyntaxError

from apex.tools.migrate.script import Script
from apex.tools.migrate.sources import UnreadableError, python_files, read
from apex.tools.migrate.uses import Use, may_use_apex, uses
from apex.tools.migrate.verdicts import Kind, Verdict, is_known, verdict_of_use


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
    scripts = Scripts(path)
    found = [
        ScriptUses(script.path, tuple((use, verdict_of_use(use)) for use in _known(script)))
        for script in scripts
    ]
    return Migration(tuple(found), tuple(scripts.unread), len(scripts.files))


def _known(script: Script) -> Iterator[Use]:
    """Yields the uses; of strings those only that name something of apex."""
    return (use for use in uses(script) if not use.quoted or is_known(use.name))


class Scripts:
    """The files of a path that may use apex, parsed one after the other.

    Attributes:
        files: All Python files of the path.
        unread: Those that could not be read so far, and why.

    Raises:
        UnreadableError: If the path itself cannot be read; for a file while iterating.
    """

    def __init__(self, path: Path) -> None:
        """Lists the files, and reads none."""
        self.files = python_files(path)
        self.unread: list[tuple[Path, str]] = []
        self._is_file = self.files == [path]

    def __iter__(self) -> Iterator[Script]:
        """Yields them in order."""
        for file in self.files:
            if (script := self._script(file)) is not None:
                yield script

    def _script(self, file: Path) -> Script | None:
        try:
            text = read(file)
            return Script(file, text) if may_use_apex(text) else None
        except UnreadableError as error:
            if self._is_file:
                raise
            self.unread.append((file, str(error)))
        except ParserSyntaxError as error:
            self.unread.append((file, f"line {error.raw_line}: not the syntax of Python 3."))
        return None
