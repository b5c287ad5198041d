"""``apex doctor``: shows which package provides apex and which dtypes are fast; advises a level."""

from __future__ import annotations

import importlib.util
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from apex._core import dtypes
from apex._core.project import VERSION
from apex._torch.devices import emulation
from apex.tools.compare.table import wrapped
from apex.tools.compare.timing import (
    Load,
    Times,
    current_load,
    least_ratio,
    operator_seconds,
)
from apex.tools.devices import describe
from apex.tools.migrate.definitions import ROOTS, SITE

LEAST_GAIN = 1.2
"""Least speed-up over fp32 in single operators that still pays off in a whole model."""

MUCH_FASTER = 1.5
"""Speed of fp16 relative to bf16 that justifies loss scaling."""

MOST_SPREAD = 1.3
"""Largest ratio of two measurements of one speed that agree."""

Speeds = Mapping[str, Mapping[str, float | None]]
"""Speed relative to fp32 by dtype and operator.

It is 0 if the operator is not supported, and None if other programs disturbed the measurement. A
dtype that the CPU emulates has none: on a busy machine, two threads measured 0.7 instead of 0.04.
"""


@dataclass(frozen=True)
class Health:
    """The result of :func:`examine`.

    Attributes:
        versions: Versions of apex-amp, torch, Python and the system, by name.
        origins: The file that provides each of our modules.
        devices: Description of each device.
        speeds: Speeds by device.
        load: Load of the machine after the measurement.
        opt_level: The level to start with; ``None`` if the machine is busy, unless its CPU emulates
            both 16-bit dtypes, which no noise changes.
        advice: The advice on that level and the reason, in one sentence.
    """

    versions: dict[str, str]
    origins: dict[str, str]
    devices: dict[str, str]
    speeds: dict[str, Speeds]
    load: Load
    opt_level: str | None
    advice: str

    def __str__(self) -> str:
        """Returns the text that ``apex doctor`` prints."""
        parts = [
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            whose(self.origins),
            "\n".join(_speed_lines(self)),
            wrapped(f"{self.advice} `apex compare` measures the levels on your model."),
        ]
        return "\n\n".join(parts)


def examine(device: torch.device) -> Health:
    """Examines the installation and the machine in a few seconds, without side effects.

    Args:
        device: The device to advise on; the CPU is also measured.
    """
    devices = {str(device): device, "cpu": torch.device("cpu")}
    descriptions = {}
    speeds = {}
    for name, measured in devices.items():
        descriptions[name] = describe(measured)
        speeds[name] = _measured(measured)
    load = current_load()
    level, advice = advise(speeds[str(device)], str(device), load)
    if device.type == "cpu" and all(map(emulation, dtypes.LOW_PRECISION)):
        level = "O0"
        advice = (
            "Start with O0: this CPU emulates fp16 and bf16, tens of times slower than fp32. Use "
            "other levels to test a script for a GPU."
        )
    return Health(
        versions={
            "apex-amp": VERSION,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        origins=origins(),
        devices=descriptions,
        speeds=speeds,
        load=load,
        opt_level=level,
        advice=advice,
    )


# -- installation ----------------------------------------------------------------------------------


def origins() -> dict[str, str]:
    """Returns where Python finds apex and its other top-level modules."""
    specs = {name: importlib.util.find_spec(name) for name in ROOTS}
    return {name: str(spec.origin) for name, spec in specs.items() if spec}


def whose(places: dict[str, str]) -> str:
    """Returns which package provides apex, and a line for each module of another package."""
    foreign = [name for name, place in places.items() if SITE not in Path(place).parents]
    provider = f"apex is provided by apex-amp, from {SITE}"
    if "apex" in foreign:
        provider = "apex is provided by another package; apex-amp adds what it lacks, as amp"
    return "\n".join([provider, *(f"{name} is from {places[name]}" for name in foreign)])


# -- speeds ----------------------------------------------------------------------------------------


def advise(speeds: Speeds, device: str, load: Load) -> tuple[str | None, str]:
    """Returns the level to start with and a sentence of advice; ``None`` on a busy machine."""
    if load.busy:
        return None, f"No level suggested: this machine is busy ({load}). Run again when it is not."
    if any(None in by_work.values() for by_work in speeds.values()):
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
    """Returns the geometric mean of speeds; 0 if an operator is not supported, or emulated."""
    if not by_work:
        return 0.0
    product = math.prod(speed or 0.0 for speed in by_work.values())
    return product ** (1 / len(by_work))


def _measured(device: torch.device) -> Speeds:
    speeds = {}
    for dtype in dtypes.LOW_PRECISION:
        by_work: dict[str, float | None] = {}
        speeds[dtypes.name(dtype)] = by_work
        if device.type == "cpu" and emulation(dtype):
            continue
        for work, times in operator_seconds(dtype, device).items():
            by_work[work] = speed_of(times)
    return speeds


def speed_of(times: Times) -> float | None:
    """Returns the speed of an operator relative to fp32, from its times in fp32 and in a dtype.

    Returns 0 without times. Returns None if other programs disturbed the repeats, so that the two
    halves of the times disagree.
    """
    if not times:
        return 0.0
    speed = least_ratio(times)
    spread = least_ratio(times[::2]) / least_ratio(times[1::2])
    if 1 / MOST_SPREAD <= spread <= MOST_SPREAD:
        return speed
    return None


def _speed_lines(health: Health) -> Iterator[str]:
    for device, description in health.devices.items():
        yield f"{device}: {description}"
        for dtype, by_work in health.speeds[device].items():
            speeds = [f"{work} {_shown(speed)}" for work, speed in by_work.items()]
            shown = ", ".join(speeds) or "emulated, tens of times slower"
            yield f"  {dtype:9} against fp32: {shown}"


def _shown(speed: float | None) -> str:
    if speed is None:
        return "not measured: busy"
    if speed == 0:
        return "no"
    return f"{speed:.3g}x"
