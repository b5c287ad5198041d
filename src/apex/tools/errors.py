"""Errors in what the user gave: the command's own, and those of the user's code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class InputError(ValueError):
    """Something that the user named cannot be used; the command ends with this message."""


class TargetError(InputError):
    """A target that cannot be used; the message gives the reason and the remedy."""


def format_error(error: BaseException) -> str:
    """Returns an error's type, the first line of its message and the user's line that raised it.

    The line is that of the first error of a chain. What amp or a later one adds follows on lines of
    its own.

    Of a ``TargetError``, it is the message.
    """
    from apex.debug.place import is_user_file  # not for `apex migrate`, which needs no torch

    if isinstance(error, TargetError):
        return str(error)
    first, *later = [*_chain(error)][::-1]
    message, *more = _lines(first) or [""]
    text = type(first).__name__
    if message:
        text += f": {message}"
    remedies: list[str] = []
    stack = traceback.extract_tb(first.__traceback__)
    frames = [frame for frame in stack if is_user_file(frame.filename)]
    for frame in frames[-1:]:
        text += f" ({frame.filename}:{frame.lineno})"
        remedies += _too_large(message, frame.line or "")
        if isinstance(first, AttributeError | ImportError | TypeError):
            remedies += _misspelt(frame)
    remedies += [line for line in more if line.startswith("amp ")]
    for cause in later:
        remedies += [line for line in _lines(cause) if line not in (message, *more)]
    return "\n  ".join([text, *dict.fromkeys(remedies)])


def _misspelt(frame: traceback.FrameSummary) -> Iterator[str]:
    """Yields what ``apex migrate`` says of misspelt names in a line."""
    from apex.tools.migrate.report import migration_of  # which uses this module

    with suppress(InputError):
        for use in migration_of(Path(frame.filename)).uses:
            if use.line == frame.lineno and "Did you mean" in use.remedy:
                yield use.remedy


def is_relative_import(error: BaseException) -> bool:
    """Returns whether a file of a package failed because it was run as a script."""
    return isinstance(error, ImportError) and "no known parent package" in str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that caused it, the first to be raised last."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).strip().splitlines()]


def _too_large(message: str, source: str) -> Iterator[str]:
    """Yields what to do about a constant beyond the range of a 16-bit type, such as a mask."""
    match = re.search(r"cannot be converted to type (?:at::|c10::)?(\w+) without overflow", message)
    if match:
        name = {"Half": "fp16", "BFloat16": "bf16"}.get(match[1], match[1])
        number = re.search(r"-\s*(?:\d[\d_.]*(?:e\+?\d+)?|(?:float\()?['\"]?inf)", source, re.I)
        value = number[0] if number else "The value"
        yield f"{value} does not fit {name}. Mask with torch.finfo(scores.dtype).min."
