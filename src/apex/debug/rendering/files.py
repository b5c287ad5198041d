"""Reports in files, in the format that the suffix names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def save(path: str | Path, what: str, formats: Mapping[str, Callable[[], str]]) -> None:
    """Writes a report.

    Args:
        path: The file.
        what: What is written, with its article, for the error message.
        formats: What returns the text, by suffix.

    Raises:
        ValueError: If the suffix is none of ``formats``; nothing is written.
    """
    target = Path(path)
    if target.suffix not in formats:
        raise ValueError(
            f"Cannot save {what} as {target.name!r}: the suffix must be one of "
            f"{', '.join(formats)}."
        )
    target.write_text(formats[target.suffix](), encoding="utf-8")
