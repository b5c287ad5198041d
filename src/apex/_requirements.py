"""Refuses to run where torch is missing or too old, with the command that mends it."""

import importlib.util
import re
import sys
from pathlib import Path

TORCH = (2, 6)
"""The oldest release of torch that apex-amp supports, as in pyproject.toml."""


def check() -> None:
    """Raises if torch is not installed, or older than apex-amp supports.

    Reads the version from torch's file, because ``apex --help`` need not wait for torch's import.

    Raises:
        ImportError: With the release that is needed and the command to run.
    """
    version = _version()
    if version is None:
        raise ImportError(_needed("torch is not installed"), name="torch")
    if tuple(int(part) for part in version.split(".")[:2]) < TORCH:
        raise ImportError(_needed(f"this is torch {version}"), name="torch")


def _version() -> str | None:
    """Returns torch's version; None where it is not installed."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).with_name("version.py")
        text = file.read_text("utf-8") if file.is_file() else ""
        written = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
        if written is not None:
            return written[1]
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # an incomplete installation: torch's own error says what it is
            raise
        return None
    return str(torch.__version__)


def _needed(found: str) -> str:
    floor = ".".join(map(str, TORCH))
    return (
        f"apex-amp needs torch {floor} or newer, and {found}. Run:\n"
        f"    {sys.executable} -m pip install --upgrade 'torch>={floor}'"
    )
