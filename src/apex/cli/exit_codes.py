"""The exit codes of the command, and errors that end it with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

OK, FAILED, BAD_INPUT, NOT_WRITTEN, NOT_FINITE, INTERRUPTED = 0, 1, 2, 3, 4, 130

MEANINGS = {
    OK: "success",
    FAILED: "part of the work failed; the output names it and holds the rest",
    BAD_INPUT: "the arguments, or the objects they name, cannot be used",
    NOT_WRITTEN: "a file could not be written",
    NOT_FINITE: "the script that `apex trace` ran made inf or NaN",
    INTERRUPTED: "interrupted",
}


class CommandError(Exception):
    """Ends the command with a message on standard error.

    Attributes:
        code: The exit code.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def bad_input(kind: type[Exception]) -> Iterator[None]:
    """Ends the command if the block raises ``kind``, with its message."""
    try:
        yield
    except kind as error:
        raise CommandError(BAD_INPUT, str(error)) from error


def epilog() -> str:
    """Returns the exit codes for the end of a help text."""
    return "exit codes:\n" + "\n".join(f"  {code:<4} {text}" for code, text in MEANINGS.items())
