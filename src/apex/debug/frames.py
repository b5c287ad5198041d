"""Finds the running line of user code: the innermost frame outside torch, apex and the stdlib."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Literal

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_APEX = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_ENGINE = {_TORCH + os.path.join("autograd", name) for name in ("graph.py", "__init__.py")}
_CHECKPOINT = _TORCH + os.path.join("utils", "checkpoint.py")


def innermost_line() -> str:
    """Returns ``"file:line"`` of the innermost user frame, or ``""`` if there is none."""
    return next((_line(frame) for frame in _frames() if _is_user(frame)), "")


def within_backward() -> tuple[str, bool]:
    """Returns the innermost user line of the running backward, and whether a checkpoint recomputes.

    The search ends at the frames of autograd's Python entry point, which threads of the engine do
    not have.
    """
    line = ""
    for frame in _frames():
        kind = _kind(frame.f_code.co_filename)
        if kind == "engine":
            break
        if kind == "checkpoint":
            return line, True
        if not line and _is_user(frame):
            line = _line(frame)
    return line, False


def is_user_file(filename: str) -> bool:
    """Returns whether a file belongs to neither torch, apex nor the standard library."""
    return _kind(filename) == "user"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_user(frame: FrameType) -> bool:
    code = frame.f_code
    # A dispatch mode observes the operator; the call itself is further out.
    return _kind(code.co_filename) == "user" and code.co_name != "__torch_dispatch__"


@functools.cache
def _kind(filename: str) -> Literal["engine", "checkpoint", "library", "user"]:
    if filename in _ENGINE:
        return "engine"
    if filename == _CHECKPOINT:
        return "checkpoint"
    if filename.startswith((_TORCH, _APEX, "<frozen")):
        return "library"
    standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return "library" if standard else "user"
