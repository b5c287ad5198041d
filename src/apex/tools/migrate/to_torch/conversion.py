"""The scripts below a path, in terms of ``torch.amp``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from apex.tools.migrate.migration import Scripts
from apex.tools.migrate.script import Script
from apex.tools.migrate.to_torch.flow import uses_amp
from apex.tools.migrate.to_torch.neighbours import neighbours
from apex.tools.migrate.to_torch.reasons import Remark
from apex.tools.migrate.to_torch.rewriting import rewritten


@dataclass(frozen=True)
class Changed:
    """A script that was rewritten.

    Attributes:
        path: Where it lies.
        before: Its source.
        after: Its new source.
        notes: What differs.
    """

    path: Path
    before: str
    after: str
    notes: tuple[Remark, ...]

    @property
    def diff(self) -> str:
        """A unified diff; ``patch -p1`` takes it."""
        name = self.path.as_posix().removeprefix("/")
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
        )
        return "".join(_ended(line) for line in lines)


@dataclass(frozen=True)
class Left:
    """A script that uses amp and stays as it is, and why."""

    path: Path
    refusals: tuple[Remark, ...]


@dataclass(frozen=True)
class Conversion:
    """What became of the scripts that use amp.

    Attributes:
        changed: Those rewritten.
        left: Those not rewritten.
        unread: Files that could not be read or parsed, and why.
    """

    changed: tuple[Changed, ...]
    left: tuple[Left, ...]
    unread: tuple[tuple[Path, str], ...]

    @property
    def diff(self) -> str:
        """The diffs of all that changed."""
        return "".join(script.diff for script in self.changed)

    @property
    def failed(self) -> bool:
        """Whether a script that uses amp stays as it is, or was not read."""
        return bool(self.left or self.unread)


def conversion_of(path: Path, *, level: str | None = None) -> Conversion:
    """Returns the scripts of a path in terms of ``torch.amp``; changes nothing.

    Args:
        path: A file or a folder.
        level: The level to assume where a script computes it.

    Raises:
        UnreadableError: If the path itself cannot be read.
    """
    scripts = Scripts(path)
    using = [script for script in scripts if uses_amp(script)]
    shared = _shared(using)
    found = [_converted(script, level, shared.get(script.path.resolve(), [])) for script in using]
    return Conversion(
        tuple(each for each in found if isinstance(each, Changed)),
        tuple(each for each in found if isinstance(each, Left)),
        tuple(scripts.unread),
    )


def _converted(script: Script, level: str | None, shared: list[Remark]) -> Changed | Left:
    result = rewritten(script, level=level)
    refusals = [*result.refusals, *shared]
    if refusals or result.after is None:
        return Left(script.path, tuple(sorted(refusals)))
    return Changed(script.path, script.text, result.after, result.notes)


def _shared(scripts: list[Script]) -> dict[Path, list[Remark]]:
    """Returns by file what it shares a session of amp with: those it imports, and the other way."""
    found: dict[Path, list[Remark]] = {}
    together = "uses amp, too: both would have to change together."
    for script in scripts:
        for other in neighbours(script):
            reason = f"{other.path.name}, which is imported here, {together}"
            found.setdefault(script.path.resolve(), []).append(Remark(other.line, reason))
            reason = f"{script.path.name}, which imports this file, {together}"
            found.setdefault(other.path, []).append(Remark(1, reason))
    return found


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
