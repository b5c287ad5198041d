"""Text wrapped to the width of a terminal."""

from __future__ import annotations

import textwrap

WIDTH = 100


def wrapped(text: str, indent: str = "", *, first: str | None = None, width: int = WIDTH) -> str:
    """Returns a paragraph in lines of at most ``width`` characters, prefixes included.

    Every line begins with ``indent``, the first with ``first`` if that is given.
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
