"""Where commands write: files, tried before the work begins, standard output and terminals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


class NotWrittenError(Exception):
    """A file that cannot be written; the command ends with this message."""


def why_not_writable(path: Path) -> str | None:
    """Returns why a file cannot be written; ``None`` if it can. Changes nothing.

    A device or a pipe is not opened, because opening a pipe waits for its reader.
    """
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not path.is_file():
            return None if os.access(path, os.W_OK) else "permission denied"
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        return _reason(error)
    return None


def write(path: Path, text: str) -> str | None:
    """Writes a file; returns why that failed, or ``None``."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return _reason(error)
    return None


def json_text(data: dict[str, Any]) -> str:
    """Returns the data as standard JSON, without NaN, and a final newline."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def check_json(file: str | None) -> None:
    """Raises if the target of ``--json``, see :func:`write_json`, cannot be written."""
    if file not in (None, "-") and (why := why_not_writable(Path(str(file)))) is not None:
        raise NotWrittenError(f"{file} cannot be written: {why}.")


def write_json(file: str | None, data: dict[str, Any]) -> None:
    """Writes data to a file, for ``"-"`` to standard output, for ``None`` nowhere; may raise."""
    if file == "-":
        sys.stdout.write(json_text(data))
    elif file is not None and (why := write(Path(file), json_text(data))) is not None:
        raise NotWrittenError(f"{file} could not be written: {why}")


def columns_of(stream: TextIO) -> int | None:
    """Returns the number of columns, by ``COLUMNS`` first; ``None`` if there is no terminal."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # a terminal that reports no size
        return None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
