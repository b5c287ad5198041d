"""What a module knows of its own tensors, where torch has no public way to ask."""

from __future__ import annotations

from collections.abc import Container

from torch import nn


def non_persistent(module: nn.Module) -> Container[str]:
    """Returns the names of the module's own buffers that its ``state_dict`` leaves out.

    A torch that keeps them elsewhere has none here.
    """
    names: Container[str] = module.__dict__.get("_non_persistent_buffers_set", ())
    return names
