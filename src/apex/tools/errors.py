"""Errors about the user's input."""

from __future__ import annotations


class InputError(ValueError):
    """An input that cannot be used; the command ends with this message."""


class NotWrittenError(InputError):
    """A file that cannot be written."""
