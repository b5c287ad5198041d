"""Lines of a script: those outside torch, apex and Python's standard library."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).parents[2]) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep


@functools.cache
def is_user_file(filename: str) -> bool:
    """Returns whether a file belongs to neither torch, apex nor the standard library."""
    if filename.startswith(_STANDARD) and "site-packages" not in filename:
        return False
    return not filename.startswith((_OURS, _TORCH, "<frozen"))


def warn_at_caller(text: str) -> None:
    """Warns at the line of a script, or of another library, that called amp or torch."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    # Python 3.12 has skip_file_prefixes for this.
    warnings.warn(text, UserWarning, stacklevel=level)
