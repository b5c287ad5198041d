"""The files that a command writes, tried before its work begins."""

from __future__ import annotations

import os
from pathlib import Path


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


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
