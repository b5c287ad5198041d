"""An error in the user's code, as one line."""

from __future__ import annotations

import traceback

from apex.debug import frames


def format_error(error: BaseException) -> str:
    """Returns an error's type, the first line of its message and the user's line that raised it.

    The location is omitted if no user code is in the traceback.
    """
    lines = str(error).strip().splitlines()
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user(frame)]
    return f"{text} ({places[-1].filename}:{places[-1].lineno})" if places else text


def _is_user(frame: traceback.FrameSummary) -> bool:
    return frames.is_user_file(frame.filename)
