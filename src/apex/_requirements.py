"""Refuses to run where torch is missing or too old, with the command that mends it."""

import sys
from importlib import metadata, util

TORCH = (2, 6)
"""The oldest release of torch that apex-amp supports, as in pyproject.toml."""


def check() -> None:
    """Raises if torch is not installed, or older than apex-amp supports.

    Reads the metadata of torch, because ``apex --help`` need not wait for torch's import. A build
    without any may be of any release.

    Raises:
        ImportError: With the release that is needed and the command to run.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        if util.find_spec("torch") is None:
            raise ImportError(_needed("torch is not installed"), name="torch") from None
        return
    if tuple(map(int, version.split(".")[:2])) < TORCH:
        raise ImportError(_needed(f"this is torch {version}"), name="torch")


def _needed(found: str) -> str:
    floor = ".".join(map(str, TORCH))
    return (
        f"apex-amp needs torch {floor} or newer, and {found}. Run:\n"
        f"    {sys.executable} -m pip install --upgrade 'torch>={floor}'"
    )
