"""``apex migrate``: every use of apex in scripts, and whether it works here."""

from __future__ import annotations

import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apex.tools.errors import InputError
from apex.tools.migrate.names import mentions_apex, names
from apex.tools.migrate.verdicts import Kind, verdict_of
from apex.tools.source import parse, read

SKIPPED = frozenset({"site-packages", "dist-packages", "build", "__pycache__"})
"""Folders skipped as copies or third-party code; hidden folders are skipped too."""


@dataclass(frozen=True)
class Use:
    """A use of apex with its verdict; the remedy is empty if it works unchanged."""

    file: str
    line: int
    name: str
    verdict: Kind
    remedy: str


@dataclass(frozen=True)
class Migration:
    """The uses of apex found at a path.

    Attributes:
        uses: In order, file by file.
        unread: Files and folders that could not be read or parsed, with the reason.
        files: Number of files searched.
    """

    uses: tuple[Use, ...]
    unread: tuple[tuple[str, str], ...]
    files: int

    @property
    def failed(self) -> bool:
        """Whether any use is unsupported or any file could not be read."""
        return bool(self.unread) or any(use.verdict == "not supported" for use in self.uses)

    @property
    def counts(self) -> dict[str, int]:
        """The number of uses by verdict."""
        counts = Counter(use.verdict for use in self.uses)
        return {verdict: counts[verdict] for verdict in ("works", "note", "not supported")}

    def to_dict(self) -> dict[str, Any]:
        """Returns every use, the unread files, and the counts, as ``--json`` writes them."""
        return {
            "uses": [asdict(use) for use in self.uses],
            "not_read": [{"file": file, "reason": reason} for file, reason in self.unread],
            "files": self.files,
            "counts": self.counts,
        }

    def __str__(self) -> str:
        """Returns a paragraph per file, the unread files, and the counts."""
        by_file: dict[str, list[Use]] = defaultdict(list)
        for use in self.uses:
            by_file[use.file].append(use)
        parts = []
        for file, uses in by_file.items():
            parts.append("\n".join([file, *_rows(uses)]))
        if self.unread:
            parts.append("\n".join(f"{file}: {reason}" for file, reason in self.unread))
        works, note, fails = self.counts.values()
        parts.append(
            f"Files: {self.files}. Uses that work unchanged: {works}, with a note: {note}, "
            f"unsupported: {fails}."
        )
        return "\n\n".join(parts)


def _rows(uses: Sequence[Use]) -> Iterator[str]:
    """Yields a row for each name with the lines of its uses, and what to do below it."""
    lines: dict[tuple[Kind, str, str], list[str]] = defaultdict(list)
    for use in uses:
        lines[use.verdict, use.name, use.remedy].append(str(use.line))
    for (verdict, name, remedy), numbers in lines.items():
        yield f"  {verdict:<13}  {name}  (line {', '.join(dict.fromkeys(numbers))})"
        if remedy:
            yield textwrap.fill(remedy, 100, initial_indent=" " * 17, subsequent_indent=" " * 17)


def migration_of(path: Path) -> Migration:
    """Returns the uses of apex in a file, or in all Python files under a folder.

    Raises:
        InputError: If the path itself cannot be read.
    """
    if not path.exists():
        raise InputError(f"There is no file or folder {path}.")
    unread: list[tuple[str, str]] = []
    files = [*_python_files(path, unread)] if path.is_dir() else [path]
    uses: list[Use] = []
    for file in files:
        try:
            text = read(file)
            if not mentions_apex(text):
                continue
            found = names(parse(text, file))
            uses += [Use(str(file), name.line, name.name, *verdict_of(name)) for name in found]
        except InputError as error:  # one bad file must not end the search
            if file == path:
                raise
            unread.append((str(file), str(error).removeprefix(f"{file} ")))
        except (RecursionError, MemoryError):  # the parser raises the second, too
            unread.append((str(file), "nested too deeply to be read."))
    return Migration(tuple(uses), tuple(unread), len(files))


def _python_files(path: Path, unread: list[tuple[str, str]]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        unread.append((str(error.filename), f"cannot be read: {error.strerror}."))

    for folder, inside, files in os.walk(path, onerror=note):
        inside[:] = sorted(name for name in inside if not _is_skipped(Path(folder, name)))
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


def _is_skipped(folder: Path) -> bool:
    if folder.name in SKIPPED or folder.name.startswith("."):
        return True
    # A virtual environment may have any name, but always this file.
    return (folder / "pyvenv.cfg").exists()
