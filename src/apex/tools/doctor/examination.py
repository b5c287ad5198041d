"""Versions, devices, speeds, conflicts and advice."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import apex
from apex._torch.devices import cpu_features
from apex.debug.rendering.formatting import counted
from apex.tools.doctor import huge_pages, installed, speeds, syncs
from apex.tools.doctor.advice import Advice, advise
from apex.tools.doctor.huge_pages import HugePages
from apex.tools.doctor.speeds import Speed
from apex.tools.load import current_load


@dataclass(frozen=True)
class Health:
    """The result of :func:`examine`.

    Attributes:
        versions: Versions of apex-amp, torch, Python and the system, by name.
        devices: Description of each device.
        speeds: Measured operators.
        conflicts: Conflicting installations, one sentence each.
        host_reads: Host reads of a tensor in one step, by fused optimizer.
        advice: The level to start with.
        huge_pages: What huge memory pages gain on the CPU; None if that was not measured.
    """

    versions: dict[str, str]
    devices: dict[str, str]
    speeds: list[Speed]
    conflicts: list[str]
    host_reads: dict[str, int]
    advice: Advice
    huge_pages: HugePages | None = None

    @property
    def well(self) -> bool:
        """Whether there is no conflict and no fused optimizer waits for the device."""
        return not self.conflicts and not any(self.host_reads.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, as ``apex doctor --json`` writes it."""
        return {**asdict(self), "well": self.well}


def examine(device: torch.device, *, budget: float = 0.2) -> Health:
    """Examines machine and installation in a few seconds, without side effects.

    Args:
        device: Device to advise on; the CPU is measured, too.
        budget: Seconds per operator and dtype; below 0.1, huge pages are not measured.
    """
    devices = dict.fromkeys([str(device), "cpu"])
    measured = [s for name in devices for s in speeds.measure(torch.device(name), budget=budget)]
    return Health(
        versions={
            "apex-amp": apex.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        devices={name: _described(torch.device(name)) for name in devices},
        speeds=measured,
        conflicts=installed.conflicts(),
        host_reads=syncs.host_reads(device),
        advice=advise(measured, str(device), current_load()),
        huge_pages=huge_pages.measure() if device.type == "cpu" and budget >= 0.1 else None,
    )


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    if device.type != "cpu":
        return device.type
    has = cpu_features()
    extensions = [n for n in ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16") if has.get(n)]
    name = has.get("cpu_name") or platform.processor() or platform.machine()
    threads = counted(torch.get_num_threads(), "thread")
    limits = [f"limited by {each}={os.environ[each]}" for each in _LIMITS if os.environ.get(each)]
    return ", ".join([name, threads, *(extensions or ["no 16-bit units"]), *limits])


_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that keep oneDNN's kernels from instructions that the CPU has."""
