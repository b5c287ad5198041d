"""The Python files at a path."""

from __future__ import annotations

import io
import os
import stat
import tokenize
from pathlib import Path

from apex.tools.errors import InputError

SKIPPED = frozenset({"site-packages", "dist-packages", "build", "__pycache__"})
"""Folders skipped as copies or third-party code; hidden folders are skipped too."""


class UnreadableError(InputError):
    """A path that cannot be read.

    Attributes:
        path: The path.
        reason: Why, as the end of a sentence.
    """

    def __init__(self, path: Path, reason: str, message: str = "") -> None:
        super().__init__(message or f"{path} {reason}")
        self.path, self.reason = path, reason


def python_files(path: Path) -> tuple[list[Path], list[UnreadableError]]:
    """Returns the file, or all ``*.py`` below a folder, in order, and the folders not readable.

    Raises:
        UnreadableError: If there is no such path, or it cannot be read at all.
    """
    if path.is_file():
        return [path], []
    if not path.exists():
        raise UnreadableError(path, "does not exist.", f"There is no file or folder {path}.")
    if not path.is_dir():
        raise UnreadableError(path, _SPECIAL)
    found: list[Path] = []
    unread: list[UnreadableError] = []
    folders = [path]
    while folders:  # os.walk recurses, and a tree may be deep
        folder = folders.pop()
        try:
            inside = _split(folder)
        except OSError as error:
            unread.append(UnreadableError(folder, f"cannot be read: {error.strerror}."))
            continue
        found += inside[0]
        folders += reversed(inside[1])
    if unread and unread[0].path == path:
        raise unread[0]
    return found, unread


def read(path: Path) -> str:
    """Returns the source, decoded as the file declares; line ends are kept.

    Raises:
        UnreadableError: If it is a notebook, a pipe or a device, or cannot be read or decoded.
    """
    if path.suffix == ".ipynb":  # JSON, most of which is a Python expression, too
        raise UnreadableError(path, f"{_NOTEBOOK} {path}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe waits for its writer
            raise UnreadableError(path, _SPECIAL)
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableError(path, f"cannot be read: {error.strerror}.") from error
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    # LookupError: a codec such as rot13, which does not decode bytes to text.
    except (SyntaxError, LookupError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UnreadableError(path, f"cannot be decoded: {reason}.") from error


_NOTEBOOK = "is a notebook. Convert it to a script first: jupyter nbconvert --to script"

_SPECIAL = "cannot be read: it is neither a file nor a folder but a pipe, socket or device."


def _split(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the Python files and the folders to search in one folder, both sorted."""
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    folders = [e.name for e in inside if e.is_dir(follow_symlinks=False)]
    kept = [Path(folder, name) for name in folders if not _is_left_out(folder, name)]
    others = [e for e in inside if e.name.endswith(".py") and not e.is_dir()]
    return [Path(folder, entry.name) for entry in others], kept


def _is_left_out(folder: Path, name: str) -> bool:
    # A virtual environment may have any name, but always this file.
    return name.startswith(".") or name in SKIPPED or (folder / name / "pyvenv.cfg").exists()
