"""The device that the user named, or the best one available."""

from __future__ import annotations

import torch


def device_named(name: str | None) -> torch.device:
    """Returns the device called ``name``; for ``None`` the accelerator, or the CPU without one.

    Raises:
        ValueError: If this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator()
    if name is None:
        return accelerator or torch.device("cpu")
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(_missing(name, here)) from None
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if device.type not in here or (device.index or 0) >= count:
        raise ValueError(_missing(name, here))
    return device


def _missing(name: str, here: list[str]) -> str:
    return f"there is no device {name!r} here; this machine has {', '.join(here)}"
