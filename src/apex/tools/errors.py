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

    The line is that of the first error of a chain. What a later one adds, such as amp's remedy,
    follows on lines of its own.

    Of a ``TargetError``, it is the message.
    """
    from apex.debug.place import is_user_file  # not for `apex migrate`, which needs no torch

    if isinstance(error, TargetError):
        return str(error)
    first, *later = [*_chain(error)][::-1]
    kind, lines = type(first).__name__, _lines(first)
    text = f"{kind}: {lines[0]}" if lines else kind
    frames = traceback.extract_tb(first.__traceback__)
    places = [frame for frame in frames if is_user_file(frame.filename)]
    place = source = ""
    if places:
        place, source = f"{places[-1].filename}:{places[-1].lineno}", places[-1].line or ""
    text += f" ({place})" if place else ""
    added = dict.fromkeys(line for each in later for line in _lines(each) if line not in lines)
    if places and isinstance(first, AttributeError | ImportError | TypeError):
        added |= dict.fromkeys(_misspelt(places[-1]))
    return "\n  ".join([text, *_too_large(lines[0] if lines else "", source), *added])


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
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


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
