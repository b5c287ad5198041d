"""The output of ``--json``: a file or standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def json_text(data: dict[str, Any]) -> str:
    """Returns the data as standard JSON, without NaN, and a final newline."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_json(command: str, file: str | None, data: dict[str, Any]) -> bool:
    """Writes the data to the target of ``--json``; returns whether that worked.

    Args:
        command: Name of the subcommand, for the message on standard error.
        file: A path, ``"-"`` for standard output, ``None`` for nowhere.
        data: The data to write.
    """
    if file == "-":
        sys.stdout.write(json_text(data))
    elif file is not None:
        try:
            Path(file).write_text(json_text(data), encoding="utf-8")
        except OSError as error:
            print(f"apex {command}: {file} could not be written: {error.strerror}", file=sys.stderr)
            return False
    return True
