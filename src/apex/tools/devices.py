"""The device that the user named, or the best one available."""

from __future__ import annotations

import contextlib

import torch

from apex._torch.devices import accelerator
from apex.tools.errors import InputError


def parse_device(name: str | None) -> torch.device:
    """Returns the device called ``name``; for ``None`` the accelerator, or the CPU without one.

    Raises:
        InputError: If this machine has no such device.
    """
    found = accelerator()
    if name is None:
        return found or torch.device("cpu")
    here = ["cpu"] if found is None else ["cpu", found.type]
    with contextlib.suppress(RuntimeError):  # no device of torch
        device = torch.device(name)
        count = 1 if device.type == "cpu" else torch.accelerator.device_count()
        if device.type in here and (device.index or 0) < count:
            return device
    raise InputError(f"there is no device {name!r} here; this machine has {', '.join(here)}")
