"""What the command's exit status means."""

OK = 0
"""All went well."""

FAILED = 1
"""The command ran, and part of what it looked at failed; the output says which."""

BAD_INPUT = 2
"""The arguments, or what they name, cannot be used."""

NOT_WRITTEN = 3
"""A file could not be written."""

INTERRUPTED = 130
"""Stopped by the user."""

MEANINGS = {
    OK: "all went well",
    FAILED: "part of it failed (the output says which); the rest is there",
    BAD_INPUT: "the arguments, or what they name, cannot be used",
    NOT_WRITTEN: "a file could not be written",
    INTERRUPTED: "interrupted",
}


def epilog() -> str:
    """Returns the exit codes as the end of a help text."""
    return "exit codes:\n" + "\n".join(f"  {code:<4} {text}" for code, text in MEANINGS.items())
