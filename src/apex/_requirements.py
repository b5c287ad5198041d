"""Refuses to run where torch is missing or too old, with the command that mends it."""

import sys

TORCH = (2, 6)
"""The oldest release of torch that apex-amp supports, as in pyproject.toml."""


def check() -> None:
    """Raises if torch is not installed, or older than apex-amp supports.

    Raises:
        ImportError: With the release that is needed and the command to run.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # an incomplete installation: torch's own error says what it is
            raise
        raise ImportError(_needed("torch is not installed"), name="torch") from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH:
        raise ImportError(_needed(f"this is torch {torch.__version__}"), name="torch")


def _needed(found: str) -> str:
    floor = ".".join(map(str, TORCH))
    return (
        f"apex-amp needs torch {floor} or newer, and {found}. Run:\n"
        f"    {sys.executable} -m pip install --upgrade 'torch>={floor}'"
    )
