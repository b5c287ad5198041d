"""Errors in what the user gave: the command's own, and those of the user's code as one line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

from apex.debug.frames import is_user_file


class InputError(ValueError):
    """Something that the user named cannot be used; the command ends with this message."""


class TargetError(InputError):
    """A target that cannot be used; the message gives the reason and the remedy."""


def format_error(error: BaseException, *, otherwise: str = "") -> str:
    """Returns an error's type, the first line of its message and the user's line that raised it.

    Args:
        error: The error; of a ``TargetError`` only the message is returned.
        otherwise: Location to name if no user code is in the traceback; by default none.
    """
    if isinstance(error, TargetError):
        return str(error)
    lines = str(error).strip().splitlines()
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if is_user_file(frame.filename)]
    place = f"{places[-1].filename}:{places[-1].lineno}" if places else otherwise
    return f"{text} ({place})" if place else text


def place_of(function: Callable[..., Any]) -> str:
    """Returns ``"file:line"`` of a function's definition; empty if it has none in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""
