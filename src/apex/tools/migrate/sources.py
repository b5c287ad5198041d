"""The Python files at a path."""

from __future__ import annotations

import os
import tokenize
from pathlib import Path

SKIPPED = frozenset({"site-packages", "dist-packages", "build", "__pycache__"})
"""Folders skipped as copies or third-party code; hidden folders are skipped too."""


class UnreadableError(Exception):
    """A path that cannot be read; the message names it and gives the reason."""


def python_files(path: Path) -> list[Path]:
    """Returns the file, or all ``*.py`` below a folder, in order.

    Raises:
        UnreadableError: If there is no such path, or the folder cannot be read.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UnreadableError(f"There is no file or folder {path}.")
    try:
        with os.scandir(path):
            pass
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from error
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not _is_left_out(Path(folder), name))
        found += (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
    return found


def read(path: Path) -> str:
    """Returns the source, decoded as the file declares; line ends are kept.

    Raises:
        UnreadableError: If it cannot be read or decoded.
    """
    try:
        with path.open("rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        return path.read_bytes().decode(encoding)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be decoded: {error}.") from error


def _is_left_out(folder: Path, name: str) -> bool:
    # A virtual environment may have any name, but always this file.
    return name.startswith(".") or name in SKIPPED or (folder / name / "pyvenv.cfg").exists()
