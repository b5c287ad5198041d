"""Which accelerator there is, and what the CPU computes in hardware."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def accelerator() -> torch.device | None:
    """Returns the accelerator of this machine, or ``None``.

    Before torch 2.7 ``current_accelerator`` names what torch was built for.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


_CPU_INFO = Path("/proc/cpuinfo")


def plain_cpu_features() -> dict[str, Any]:
    """Returns the CPU's features as Linux lists them; elsewhere only its architecture."""
    found: dict[str, Any] = {"architecture": platform.machine()}
    if _CPU_INFO.exists():
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        parts = (line.partition(":") for line in lines)
        entries = {name.strip(): value.strip() for name, _, value in parts}
        found.update(dict.fromkeys(entries.get("flags", "").split(), True))
        found["cpu_name"] = entries.get("model name", "")
    return found


cpu_features: Callable[[], dict[str, Any]] = getattr(
    torch.cpu, "get_capabilities", plain_cpu_features
)
"""Returns the CPU's features by name, such as ``avx512_fp16``, and its ``architecture``."""
