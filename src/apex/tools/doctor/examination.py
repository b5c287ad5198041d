"""Versions, devices, speeds, conflicts and advice."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from apex._core import dtypes
from apex._core.project import VERSION
from apex._torch.devices import cpu_features
from apex.debug.rendering.formatting import counted
from apex.tools.doctor import huge_pages, installed, speeds, syncs
from apex.tools.doctor.advice import Advice, advise
from apex.tools.doctor.huge_pages import HugePages
from apex.tools.doctor.speeds import Speed
from apex.tools.load import current_load
from apex.tools.wrapping import wrapped


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

    def __str__(self) -> str:
        """Returns the text that ``apex doctor`` prints."""
        waiting = {name: count for name, count in self.host_reads.items() if count}
        free = ", ".join(name for name in self.host_reads if name not in waiting)
        steps = [f"No host sync per step under a dynamic loss scale: {free}."] if free else []
        steps += [f"{name} makes the host wait {n} times per step." for name, n in waiting.items()]
        conflicts = [f"Conflict: {conflict}." for conflict in self.conflicts]
        parts = [
            [", ".join(f"{name} {version}" for name, version in self.versions.items())],
            list(_speed_lines(self)),
            conflicts or ["Installation: no conflicting apex."],
            steps,
            [] if self.huge_pages is None else [str(self.huge_pages)],
            [f"{self.advice} `apex compare` measures the gain on your model."],
        ]
        return "\n\n".join("\n".join(map(wrapped, part)) for part in parts if part)


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
            "apex-amp": VERSION,
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


def _speed_lines(health: Health) -> Iterator[str]:
    yield f"{'':8}{'':10}" + "".join(f"{name:>22}" for name in map(dtypes.name, speeds.DTYPES))
    for device, what in health.devices.items():
        yield f"{device}: {what}"
        for work in speeds.WORK:
            cells = [s for s in health.speeds if (s.device, s.work) == (device, work)]
            base = cells[0].per_second
            yield f"{'':8}{work:10}" + "".join(f"{_cell(cell, base):>22}" for cell in cells)


def _cell(speed: Speed, base: float) -> str:
    if speed.seconds is None:
        return "not supported"
    times = f"{speed.per_second / base:.2f}x" if base else ""
    return f"{speed.per_second / 1e9:,.0f} GFLOP/s {times:>7}"
