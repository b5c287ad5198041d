"""A stand-in for NVIDIA's apex after May 2025: its layout, without ``amp``."""

from . import normalization, optimizers

__all__ = ["normalization", "optimizers"]
WHOSE = "theirs"


def deprecated_warning(msg):
    raise NotImplementedError(msg)
