"""``apex migrate``: lists every use of apex in scripts, and whether it works here."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from apex.tools.errors import InputError
from apex.tools.migrate.names import names
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
        not_read: Files and folders that could not be read or parsed, with the reason.
        files: Number of files searched.
    """

    uses: list[Use]
    not_read: list[dict[str, str]]
    files: int

    @property
    def failed(self) -> bool:
        """Whether any use is unsupported or any file could not be read."""
        return bool(self.not_read or self.counts["not supported"])

    @property
    def counts(self) -> dict[str, int]:
        """The number of uses by verdict."""
        counts = Counter(use.verdict for use in self.uses)
        return {verdict: counts[verdict] for verdict in ("works", "note", "not supported")}

    def __str__(self) -> str:
        """Returns a paragraph per file, also of unread ones, and the counts.

        A remedy is below the first use that it is for.
        """
        parts = []
        told: set[str] = set()
        for file, uses in itertools.groupby(self.uses, attrgetter("file")):
            parts.append("\n".join([file, *_rows(uses, told)]))
        parts += ["{file} {reason}".format_map(unread) for unread in self.not_read]
        works, note, fails = self.counts.values()
        parts.append(
            f"Files: {self.files}. Uses that work unchanged: {works}, with a note: {note}, "
            f"unsupported: {fails}."
        )
        return "\n\n".join(parts)


def _rows(uses: Iterable[Use], told: set[str]) -> Iterator[str]:
    """Yields a row for each name with the lines of its uses, and a remedy that is not ``told``."""
    lines_by_row = defaultdict(list)
    for use in uses:
        row = replace(use, line=0)
        lines_by_row[row].append(str(use.line))
    indent = " " * 17
    for row, lines in lines_by_row.items():
        numbers = ", ".join(dict.fromkeys(lines))
        yield f"  {row.verdict:<13}  {row.name}  (line {numbers})"
        if row.remedy and row.remedy not in told:
            told.add(row.remedy)
            yield textwrap.fill(row.remedy, 100, initial_indent=indent, subsequent_indent=indent)


def migration_of(path: Path) -> Migration:
    """Returns the uses of apex in a file, or in all Python files under a folder.

    Raises:
        InputError: If the path itself cannot be read, or has no Python files.
    """
    not_read: list[dict[str, str]] = []
    files = [path]
    if os.path.isdir(path):  # Path.is_dir() raises for some paths
        files = _python_files(path, not_read)
        if not files and not not_read:
            raise InputError(f"{path} has no *.py files outside of skipped folders.")
    uses: list[Use] = []
    for file in files:
        reason = ""
        try:
            text = read(file)
            if "import" in text:  # else it uses nothing of apex
                found = names(parse(text, file))
                uses += [Use(str(file), use.line, use.name, *verdict_of(use)) for use in found]
        except InputError as error:  # one bad file must not end the search
            if file == path:
                raise
            reason = str(error).removeprefix(f"{file} ")
        except (RecursionError, MemoryError):  # the parser raises either
            reason = "nested too deeply to be read."
        if reason:
            not_read.append({"file": str(file), "reason": reason})
    return Migration(uses, not_read, len(files))


def _python_files(path: Path, not_read: list[dict[str, str]]) -> list[Path]:
    """Returns the files in a folder in order; adds folders that cannot be read to ``not_read``."""

    def note(error: OSError) -> None:
        not_read.append({"file": error.filename, "reason": f"cannot be read: {error.strerror}."})

    python_files: list[Path] = []
    for folder, subfolders, files in os.walk(path, onerror=note):
        # os.walk enters the folders that are left in this list.
        subfolders[:] = [name for name in sorted(subfolders) if not _is_skipped(folder, name)]
        python_files += [Path(folder, name) for name in sorted(files) if name.endswith(".py")]
    return python_files


def _is_skipped(parent: str, name: str) -> bool:
    if name in SKIPPED or name.startswith("."):
        return True
    # A virtual environment may have any name, but always this file.
    return os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
