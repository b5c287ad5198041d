"""All uses of apex in the files at a path, each with its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from apex.tools.migrate.sources import UnreadableError, python_files, read
from apex.tools.migrate.uses import Use, uses
from apex.tools.migrate.verdicts import Kind, Verdict, is_known, verdict_of_use


@dataclass(frozen=True)
class Migration:
    """The uses of apex found at a path.

    Attributes:
        uses: Each use, its file before and its verdict after it; in order, file by file.
        unread: Files and folders that could not be read or parsed, with the reason.
        files: Number of files searched.
    """

    uses: tuple[tuple[Path, Use, Verdict], ...]
    unread: tuple[tuple[Path, str], ...]
    files: int

    @property
    def failed(self) -> bool:
        """Whether any use is unsupported or any file could not be read."""
        return bool(self.unread) or any(v.kind is Kind.NOT_SUPPORTED for _, _, v in self.uses)


def migration_of(path: Path) -> Migration:
    """Returns the uses of apex in a file, or in all Python files under a folder.

    Raises:
        UnreadableError: If the path itself cannot be read.
    """
    files, folders = python_files(path)
    found: list[tuple[Path, Use, Verdict]] = []
    unread = [(error.path, error.reason) for error in folders]
    for file in files:
        try:
            # Any string may look like a full name; only those that apex has, or had, count.
            own = [use for use in uses(read(file)) if not use.quoted or is_known(use.name)]
            found += [(file, use, verdict_of_use(use)) for use in own]
        except UnreadableError as error:  # noqa: PERF203 - one bad file must not end the search
            if file == path:
                raise
            unread.append((file, error.reason))
        except (RecursionError, MemoryError):  # the parser raises the second, too
            unread.append((file, "nested too deeply to be read."))
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes, before Python 3.12
            line = error.lineno if isinstance(error, SyntaxError) else None
            unread.append((file, f"line {line or 1}: not valid Python 3 syntax."))
    return Migration(tuple(found), tuple(unread), len(files))
