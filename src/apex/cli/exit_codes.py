"""The exit codes of the command."""

from __future__ import annotations

from collections.abc import Mapping

OK, FAILED, BAD_INPUT, NOT_WRITTEN, NOT_FINITE, INTERRUPTED = 0, 1, 2, 3, 4, 130

MEANINGS = {
    OK: "success",
    FAILED: "part of the work failed; the output names it and holds the rest",
    BAD_INPUT: "the arguments, or the objects they name, cannot be used",
    NOT_WRITTEN: "a file could not be written",
    NOT_FINITE: "the script that `apex trace` ran made inf or NaN",
    INTERRUPTED: "interrupted",
}


def of_command(own: Mapping[int, str]) -> dict[int, str]:
    """Returns what exit codes mean for one command: those of all, and its ``own``."""
    shared = {code: MEANINGS[code] for code in (OK, BAD_INPUT, NOT_WRITTEN, INTERRUPTED)}
    return dict(sorted({**shared, **own}.items()))


def epilog(meanings: Mapping[int, str] = MEANINGS) -> str:
    """Returns the exit codes for the end of a help text."""
    return "exit codes:\n" + "\n".join(f"  {code:<4} {text}" for code, text in meanings.items())
