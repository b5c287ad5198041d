"""Progress of a long run: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import importlib
import math
import time
from typing import Any, TextIO

SECONDS_BETWEEN_LINES = 5.0


def progress_on(stream: TextIO) -> Progress:
    """Returns a bar if ``stream`` is a terminal and tqdm is installed; otherwise plain lines.

    On a terminal, a notice names tqdm, and there is also a line every few seconds.
    """
    if not stream.isatty():
        return Progress(stream, seconds=math.inf)
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        stream.write("tqdm is not installed: plain progress (pip install 'apex-amp[demo]')\n")
        return Progress(stream)
    return _BarProgress(tqdm, stream)


class Progress:
    """The progress of a run: a line for each activity, and one every few seconds."""

    def __init__(self, stream: TextIO, *, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self._stream, self._seconds = stream, seconds
        self._text = ""
        self._total = self._done = 0
        self._shown = time.monotonic()

    def start(self, total: int) -> None:
        """Sets the number of steps."""
        self._total = total

    def describe(self, text: str) -> None:
        """Sets the description of the current activity, and writes a line."""
        self._text = text
        self._line()

    def step(self) -> None:
        """Counts one step; writes a line if the last one is a few seconds old."""
        self._done += 1
        if time.monotonic() - self._shown >= self._seconds:
            self._line()

    def close(self) -> None:
        """Ends the display."""

    def _line(self) -> None:
        self._shown = time.monotonic()
        self._stream.write(f"[{self._done}/{self._total}] {self._text}\n")
        self._stream.flush()


class _BarProgress(Progress):
    """A tqdm progress bar."""

    def __init__(self, tqdm: Any, stream: TextIO) -> None:
        super().__init__(stream)
        self._tqdm = tqdm
        self._bar: Any = None

    def start(self, total: int) -> None:
        self._bar = self._tqdm(
            total=total, unit="step", dynamic_ncols=True, smoothing=0.05, file=self._stream
        )

    def describe(self, text: str) -> None:
        self._bar.set_description(text)

    def step(self) -> None:
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
