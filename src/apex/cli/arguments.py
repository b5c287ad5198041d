"""Arguments that several commands take, and errors that say what they accept."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that names the value an option lacks."""

    def error(self, message: str) -> NoReturn:
        """Prints usage and message; exits with code 2."""
        option, colon, fault = message.removeprefix("argument ").partition(": ")
        if colon and fault == "expected one argument":
            message = f"{option} needs a value"
            message += ": a file, or - for standard output" if option == "--json" else ""
        super().error(message)


def count(text: str) -> int:
    """Parses an integer of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; it must be at least 1")
    return value


def seed(text: str) -> int:
    """Parses an integer that fits in 64 bits."""
    value = whole(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"got {text}; it must fit in 64 bits")
    return value


def whole(text: str) -> int:
    """Parses an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; it must be a whole number") from None
