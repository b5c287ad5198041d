"""Errors about the user's input: the command's own, and errors raised by the user's code."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class InputError(ValueError):
    """Something that the user named cannot be used; the command ends with this message."""


class NotWrittenError(InputError):
    """A file that cannot be written."""


def format_error(error: BaseException) -> str:
    """Returns an error's type, the first line of its message and the user's line that raised it.

    In a chain of errors, the first one has the line. Messages that amp or a later error adds follow
    on separate lines. For an ``InputError``, returns only the message.
    """
    from apex.debug.place import is_user_file  # not for `apex migrate`, which needs no torch

    if isinstance(error, InputError):
        return str(error)
    later: list[BaseException] = []
    first = error
    while first.__cause__ is not None:
        later.insert(0, first)
        first = first.__cause__
    message, *more = _lines(first) or [""]
    text = type(first).__name__
    if message:
        text += f": {message}"
    remedies: list[str] = []
    stack = traceback.extract_tb(first.__traceback__)
    frames = [frame for frame in stack if is_user_file(frame.filename)]
    for frame in frames[-1:]:
        text += f" ({frame.filename}:{frame.lineno})"
        if isinstance(first, AttributeError | ImportError | TypeError):
            remedies += _misspelt(frame)
    if message.endswith("without overflow"):  # torch's, of a number for a 16-bit tensor
        remedies.append("The number does not fit. Mask with torch.finfo(scores.dtype).min.")
    remedies += itertools.dropwhile(lambda line: not line.startswith("amp."), more)
    for cause in later:
        remedies += [line for line in _lines(cause) if line not in (message, *more)]
    return "\n  ".join([text, *dict.fromkeys(remedies)])


def _misspelt(frame: traceback.FrameSummary) -> Iterator[str]:
    """Yields the suggestions of ``apex migrate`` for misspelt names in a line."""
    from apex.tools.migrate.report import migration_of  # which uses this module

    with suppress(InputError):
        for use in migration_of(Path(frame.filename)).uses:
            if use.line == frame.lineno and "Did you mean" in use.remedy:
                yield use.remedy


def is_relative_import(error: BaseException) -> bool:
    """Returns whether a file of a package failed because it was run as a script."""
    return isinstance(error, ImportError) and "no known parent package" in str(error)


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).strip().splitlines()]
