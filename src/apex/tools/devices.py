"""Finds the device that the user named, or the best one available, and describes it."""

from __future__ import annotations

import torch

from apex._torch.devices import accelerator, cpu_features
from apex.debug.common import counted
from apex.tools.errors import InputError


def describe(device: torch.device) -> str:
    """Returns the device's name; for a CPU, also its threads and 16-bit units."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    features = cpu_features()
    name = features.get("cpu_name") or "CPU"
    threads = counted(torch.get_num_threads(), "thread")
    units = filter(features.get, ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"))
    return ", ".join([name, threads, *units])


def parse_device(name: str | None) -> torch.device:
    """Returns the named device; for ``None``, the accelerator, or the CPU if there is none.

    Raises:
        InputError: If this machine has no such device.
    """
    if name is None:
        return accelerator() or torch.device("cpu")
    try:
        return torch.empty(0, dtype=torch.uint8, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch lacks the device, or the machine does
        why, _, _ = str(error).partition("\n")
        raise InputError(f"there is no device {name!r} here: {why}") from error
