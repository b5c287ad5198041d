"""Messages about errors that the user's code raises."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from apex._core.user_files import is_user_file
from apex.tools.errors import InputError
from apex.tools.migrate.report import migration_of
from apex.tools.source import old_syntax


def format_error(error: BaseException) -> str:
    """Returns an error's type, the first line of its message and the user's line that raised it.

    In a chain of errors, these describe the first one. Messages that amp or later errors add follow
    on separate lines. For an ``InputError``, returns only the message.
    """
    if isinstance(error, InputError):
        return str(error)
    chain = [error]
    while chain[0].__cause__ is not None:
        chain.insert(0, chain[0].__cause__)
    first, *later = chain
    lines = _lines(first) or [""]
    message = lines[0]
    text = type(first).__name__
    if message:
        text += f": {message}"
    remedies = [old_syntax(first)]
    stack = traceback.extract_tb(first.__traceback__)
    frames = [frame for frame in stack if is_user_file(frame.filename)]
    if frames:
        text += f" ({frames[-1].filename}:{frames[-1].lineno})"
        remedies += _misspelt(frames[-1])
    if message.endswith("Half without overflow"):  # a number beyond the range of fp16
        remedies.append("The number does not fit. Mask with torch.finfo(scores.dtype).min.")
    if message.endswith("no known parent package"):
        remedies.append(
            "A file that is run belongs to no package: import its neighbours without the dot, or "
            "trace it as a module, `apex trace -m package.module`."
        )
    remedies += itertools.dropwhile(lambda line: not line.startswith("amp."), lines[1:])
    for wrapper in later:
        remedies += [line for line in _lines(wrapper) if line not in lines]
    return "\n  ".join(filter(None, [text, *dict.fromkeys(remedies)]))


def _misspelt(frame: traceback.FrameSummary) -> Iterator[str]:
    """Yields the suggestions of ``apex migrate`` for misspelt names in a line."""
    with suppress(InputError):
        migration = migration_of(Path(frame.filename))
        for use in migration.uses:
            if use.line == frame.lineno and "Did you mean" in use.remedy:
                yield use.remedy


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).strip().splitlines()]
