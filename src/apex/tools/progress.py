"""Progress of a long run: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TextIO

SECONDS_BETWEEN_LINES = 5.0


def progress_on(stream: TextIO) -> Start:
    """Returns what begins to show progress: tqdm's bar if it is installed, on a terminal, or lines.

    On a terminal, a notice names tqdm, and there is also a line every few seconds.
    """
    if not stream.isatty():
        return partial(Progress, file=stream, seconds=math.inf)
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        stream.write("tqdm is not installed: plain progress (pip install 'apex-amp[demo]')\n")
        return partial(Progress, file=stream)
    return partial(tqdm, file=stream, unit="step", dynamic_ncols=True, smoothing=0.05)


class Progress:
    """The progress of a run: a line for each activity, and one every few seconds.

    Its methods are those of tqdm's bar.
    """

    def __init__(self, total: int, file: TextIO, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self._total, self._file, self._seconds = total, file, seconds
        self._text = ""
        self._done = 0
        self._shown = time.monotonic()

    def set_description(self, text: str) -> None:
        """Sets the description of the current activity, and writes a line."""
        self._text = text
        self._line()

    def update(self) -> None:
        """Counts one step; writes a line if the last one is a few seconds old."""
        self._done += 1
        if time.monotonic() - self._shown >= self._seconds:
            self._line()

    def close(self) -> None:
        """Ends the display."""

    def _line(self) -> None:
        self._shown = time.monotonic()
        self._file.write(f"[{self._done}/{self._total}] {self._text}\n")
        self._file.flush()


Start = Callable[..., Progress]
"""Begins to show progress; takes ``total``, the number of steps."""
