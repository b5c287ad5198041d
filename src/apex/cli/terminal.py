"""The width of the terminal that a stream writes to."""

from __future__ import annotations

import os
from typing import TextIO


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
