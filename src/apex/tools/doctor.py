"""``apex doctor``: which package provides apex, which dtypes are fast, and advice."""

from __future__ import annotations

import importlib.util
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from apex._core import dtypes
from apex._core.project import VERSION
from apex.tools.compare.table import wrapped
from apex.tools.compare.timing import Load, current_load, least_ratio, operator_seconds
from apex.tools.devices import describe
from apex.tools.migrate.definitions import ROOTS, SITE

LEAST_GAIN = 1.2
"""Least speed-up over fp32 in single operators that still pays off in a whole model."""

MUCH_FASTER = 1.5
"""Speed of fp16 relative to bf16 that justifies loss scaling."""

MOST_SPREAD = 1.3
"""Largest ratio of two measurements of one speed that agree."""

LEAST_SPEED = 1e-3
"""No device is slower relative to fp32; emulated fp16 reaches 0.012."""

MOST_SPEED = 64.0
"""No device is faster relative to fp32; Intel's AMX reaches 32."""


@dataclass(frozen=True)
class Health:
    """The result of :func:`examine`.

    Attributes:
        versions: Versions of apex-amp, torch, Python and the system, by name.
        origins: The file that each of our modules comes from.
        devices: Description of each device.
        speeds: Speed relative to fp32 by device, dtype and operator; 0 if it is not supported, None
            if it was not measured because the machine is busy.
        load: Load of the machine while they were measured.
        opt_level: The level to start with; ``None`` if the machine is busy.
        advice: That level and why, in one sentence.
    """

    versions: dict[str, str]
    origins: dict[str, str]
    devices: dict[str, str]
    speeds: dict[str, dict[str, dict[str, float | None]]]
    load: Load
    opt_level: str | None
    advice: str

    def __str__(self) -> str:
        """Returns the text that ``apex doctor`` prints."""
        parts = [
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            whose(self.origins),
            "\n".join(_speed_lines(self)),
            wrapped(f"{self.advice} `apex compare` measures the gain on your model."),
        ]
        return "\n\n".join(parts)


def examine(device: torch.device) -> Health:
    """Examines the installation and the machine in a few seconds, without side effects.

    Args:
        device: Device to advise on; the CPU is measured, too.
    """
    names = [*dict.fromkeys([str(device), "cpu"])]
    speeds = {name: _measured(torch.device(name)) for name in names}
    load = current_load()
    level, advice = advise(speeds[str(device)], str(device), load)
    return Health(
        versions={
            "apex-amp": VERSION,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        origins=origins(),
        devices={name: describe(torch.device(name)) for name in names},
        speeds=speeds,
        load=load,
        opt_level=level,
        advice=advice,
    )


# -- installation ----------------------------------------------------------------------------------


def origins() -> dict[str, str]:
    """Returns where Python finds apex and the modules that NVIDIA's apex has, too."""
    places = {}
    for name in ROOTS:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        places[name] = origin or "nowhere"
    return places


def whose(places: dict[str, str]) -> str:
    """Returns a line on which package provides apex, and one for each module of another."""
    theirs = [name for name, place in places.items() if SITE not in Path(place).parents]
    lines = [f"{name} is from {places[name]}" for name in theirs]
    if "apex" in theirs:
        lines.append("apex is provided by another package; apex-amp adds what it lacks, as amp")
    else:
        lines.insert(0, f"apex is provided by apex-amp, from {SITE}")
    return "\n".join(lines)


# -- speeds ----------------------------------------------------------------------------------------


def advise(
    speeds: Mapping[str, Mapping[str, float | None]], device: str, load: Load
) -> tuple[str | None, str]:
    """Returns the level to start with, ``None`` on a busy machine, and a sentence."""
    if load.busy:
        return None, f"No level suggested: this machine is busy ({load}). Run again when it is not."
    for by_work in speeds.values():
        if None in by_work.values():
            return None, "No level suggested: other programs disturbed the measurement. Run again."
    fp16 = _mean(speeds["float16"])
    bf16 = _mean(speeds["bfloat16"])
    if fp16 >= LEAST_GAIN and fp16 > bf16 * MUCH_FASTER:
        return "O1", (
            f"Start with O1: fp16 is {fp16:.2g} times as fast as fp32 on {device} and bf16 only "
            f"{bf16:.2g} times; O1 casts by operator and scales the loss. O2 also stores the model "
            "in fp16."
        )
    if bf16 >= LEAST_GAIN:
        return "O4", (
            f"Start with O4: bf16 is {bf16:.2g} times as fast as fp32 on {device} and needs no "
            "loss scaling; O4 casts by operator. O5 also stores the model in bf16."
        )
    return "O0", (
        f"Start with O0: bf16 is {bf16:.2g} times and fp16 {fp16:.2g} times as fast as fp32 on "
        f"{device}, too little to benefit."
    )


def _mean(by_work: Mapping[str, float | None]) -> float:
    """Returns the geometric mean of speeds; 0 if an operator is not supported."""
    values = [speed or 0.0 for speed in by_work.values()]
    return statistics.geometric_mean(values) if all(values) else 0.0


def _measured(device: torch.device) -> dict[str, dict[str, float | None]]:
    speeds = {}
    for dtype in (torch.float16, torch.bfloat16):
        seconds = operator_seconds(dtype, device)
        by_work = {work: speed_of(times) for work, times in seconds.items()}
        speeds[dtypes.name(dtype)] = by_work
    return speeds


def speed_of(times: Sequence[tuple[float, float]]) -> float | None:
    """Returns the speed of an operator relative to fp32 from its times in fp32 and in a dtype.

    0 without times. None if other programs disturbed every repeat: then the two halves of the times
    disagree, or the speed is beyond any hardware's.
    """
    if not times:
        return 0.0
    speed = least_ratio(times)
    even = least_ratio(times[::2])
    odd = least_ratio(times[1::2])
    if not LEAST_SPEED <= speed <= MOST_SPEED:
        return None
    return speed if 1 / MOST_SPREAD <= even / odd <= MOST_SPREAD else None


def _speed_lines(health: Health) -> Iterator[str]:
    for device, what in health.devices.items():
        yield f"{device}: {what}"
        for dtype, by_work in health.speeds[device].items():
            cells = [f"{work} {_shown(speed)}" for work, speed in by_work.items()]
            yield f"  {dtype:9} against fp32: {', '.join(cells)}"


def _shown(speed: float | None) -> str:
    if speed is None:
        return "not measured: busy"
    if speed == 0:
        return "no"
    return f"{speed:.2f}x" if speed >= 0.1 else f"{speed:.2g}x"
