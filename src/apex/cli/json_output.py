"""What ``--json`` names: a file, or standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def json_text(data: dict[str, Any]) -> str:
    """Returns the data as JSON that every reader takes, with a line end."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_json(command: str, file: str | None, data: dict[str, Any]) -> bool:
    """Writes the data where ``--json`` says, and returns whether it could be written.

    Args:
        command: Name of the subcommand, for the message on standard error.
        file: A path, ``"-"`` for standard output, ``None`` for nowhere.
        data: To be written.
    """
    if file == "-":
        sys.stdout.write(json_text(data))
    elif file is not None:
        try:
            Path(file).write_text(json_text(data), encoding="utf-8")
        except OSError as error:
            print(f"apex {command}: {file} not written: {error.strerror}", file=sys.stderr)
            return False
    return True
