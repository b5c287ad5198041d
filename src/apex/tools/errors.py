"""An error of the user's code, in a line."""

from __future__ import annotations

import traceback

from apex.debug import frames


def said(error: BaseException) -> str:
    """Returns the kind of an error, the first line of what it says, and the user's line it is from.

    The line is left out where the error began in no code of the user's.
    """
    lines = str(error).strip().splitlines()
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user(frame)]
    return f"{text} ({places[-1].filename}:{places[-1].lineno})" if places else text


def _is_user(frame: traceback.FrameSummary) -> bool:
    return frames.is_user_file(frame.filename)
