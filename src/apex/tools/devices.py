"""The device that the user named, or the best one available."""

from __future__ import annotations

import torch

from apex._torch.devices import accelerator, cpu_features
from apex.debug.common import counted
from apex.tools.errors import InputError


def describe(device: torch.device) -> str:
    """Returns the device's name, threads and 16-bit units."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    features = cpu_features()
    parts = [features.get("cpu_name") or "CPU", counted(torch.get_num_threads(), "thread")]
    units = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    parts += [unit for unit in units if features.get(unit)]
    return ", ".join(parts)


def parse_device(name: str | None) -> torch.device:
    """Returns the device called ``name``; for ``None`` the accelerator, or the CPU without one.

    Raises:
        InputError: If this machine has no such device.
    """
    if name is None:
        return accelerator() or torch.device("cpu")
    try:
        return torch.empty(0, dtype=torch.uint8, device=name).device
    except (RuntimeError, AssertionError) as error:  # no device of torch, or none here
        why = str(error).partition("\n")[0]
        raise InputError(f"there is no device {name!r} here: {why}") from error
