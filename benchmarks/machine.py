"""The machine and software of a measurement."""

from __future__ import annotations

import os
import platform

import torch


def machine() -> dict[str, object]:
    """Returns the machine and the software, as plain data."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    known = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.6 has no such function
    name = known.get("cpu_name", platform.machine())
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
