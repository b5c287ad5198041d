"""The output of ``--json``: a file or standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from apex.cli.output_files import why_not_writable, write


def json_text(data: dict[str, Any]) -> str:
    """Returns the data as standard JSON, without NaN, and a final newline."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def json_is_writable(command: str, file: str | None) -> bool:
    """Returns whether the target of ``--json`` can be written; says why if not.

    Args:
        command: Name of the subcommand, for the message on standard error.
        file: A path, ``"-"`` for standard output, ``None`` for nowhere.
    """
    why = None if file in (None, "-") else why_not_writable(Path(str(file)))
    if why is not None:
        print(f"apex {command}: {file} cannot be written: {why}.", file=sys.stderr)
    return why is None


def write_json(command: str, file: str | None, data: dict[str, Any]) -> bool:
    """Writes the data to the target of ``--json``; returns whether that worked.

    Args:
        command: Name of the subcommand, for the message on standard error.
        file: A path, ``"-"`` for standard output, ``None`` for nowhere.
        data: The data to write.
    """
    if file == "-":
        sys.stdout.write(json_text(data))
    elif file is not None and (why := write(Path(file), json_text(data))) is not None:
        print(f"apex {command}: {file} could not be written: {why}", file=sys.stderr)
        return False
    return True
