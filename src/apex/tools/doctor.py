"""``apex doctor``: whose apex is whose, fast dtypes, and advice."""

from __future__ import annotations

import functools
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import apex
from apex._core import dtypes
from apex._core.project import VERSION
from apex._torch.devices import cpu_features
from apex.debug.common import counted
from apex.tools.compare.timing import Load, LoadMeter, seconds

MODULES = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")
"""Our top-level modules that in NVIDIA's apex are compiled extensions."""

PARTS = ("amp", "parallel", "fp16_utils", "RNN", "reparameterization", "debug")
"""Our subpackages that NVIDIA's apex lacks."""

OURS = Path(__file__).parents[1]
"""The folder of our ``apex``."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDS = 5
"""Turns of each dtype, a short slice of time each, so that a load meets all of them."""

BUDGET = 0.15
"""Seconds per operator and dtype."""

LEAST_GAIN = 1.2
"""Least speed-up over fp32 in single operators that still pays off in a whole model."""

MUCH_FASTER = 1.5
"""Speed of fp16 relative to bf16 that justifies loss scaling."""


@dataclass(frozen=True)
class Health:
    """The result of :func:`examine`.

    Attributes:
        versions: Versions of apex-amp, torch, Python and the system, by name.
        origins: The folder or file that each of our modules comes from.
        devices: Description of each device.
        speeds: Operations per second by device, operator and dtype; 0 if it is not supported.
        load: Load of the machine while they were measured.
        opt_level: The level to start with; ``None`` if the machine is busy.
        advice: That level and why, in one sentence.
    """

    versions: dict[str, str]
    origins: dict[str, str]
    devices: dict[str, str]
    speeds: dict[str, dict[str, dict[str, float]]]
    load: Load
    opt_level: str | None
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, as ``apex doctor --json`` writes it."""
        return asdict(self)

    def __str__(self) -> str:
        """Returns the text that ``apex doctor`` prints."""
        parts = [
            [", ".join(f"{name} {version}" for name, version in self.versions.items())],
            [whose(self.origins)],
            [*_speed_lines(self)],
            [f"{self.advice} `apex compare` measures the gain on your model."],
        ]
        return "\n\n".join("\n".join(part) for part in parts)


def examine(device: torch.device) -> Health:
    """Examines the installation and the machine in a few seconds, without side effects.

    Args:
        device: Device to advise on; the CPU is measured, too.
    """
    names = [*dict.fromkeys([str(device), "cpu"])]
    with LoadMeter() as meter:
        speeds = {name: _measured(torch.device(name)) for name in names}
    level, advice = advise(speeds[str(device)], str(device), meter.load)
    return Health(
        versions={
            "apex-amp": VERSION,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        origins=origins(),
        devices={name: _described(torch.device(name)) for name in names},
        speeds=speeds,
        load=meter.load,
        opt_level=level,
        advice=advice,
    )


# -- installation ----------------------------------------------------------------------------------


def origins() -> dict[str, str]:
    """Returns where Python finds apex and the modules that NVIDIA's apex has, too."""
    found = {"apex": str(Path(apex.__file__).parent)}
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        found[name] = "nowhere" if spec is None or spec.origin is None else spec.origin
    return found


def whose(found: dict[str, str]) -> str:
    """Returns one line on whose apex is whose."""
    kernels = [name for name in MODULES if OURS.parent not in Path(found[name]).parents]
    theirs = "".join(f", {name} from {found[name]}" for name in kernels)
    if Path(found["apex"]) == OURS:
        return f"apex is apex-amp's, all of it, from {OURS}{theirs}"
    parts = [name for name in PARTS if not (Path(found["apex"]) / name).exists()]
    return (
        f"apex is another distribution's, {_version()}from {found['apex']}{theirs}; "
        f"apex-amp adds {', '.join(parts)}"
    )


def _version() -> str:
    try:
        return f"version {metadata.version('apex')}, "
    except metadata.PackageNotFoundError:
        return ""


# -- speeds ----------------------------------------------------------------------------------------


def advise(speeds: dict[str, dict[str, float]], device: str, load: Load) -> tuple[str | None, str]:
    """Returns the level to start with, ``None`` on a busy machine, and a sentence."""
    if load.busy:
        return None, f"No level suggested: this machine is busy ({load}). Run again when it is not."
    fp16, bf16 = (_ratio(speeds, name) for name in ("float16", "bfloat16"))
    if fp16 >= LEAST_GAIN and fp16 > bf16 * MUCH_FASTER:
        return "O1", (
            f"Start with O1: fp16 is {fp16:.2g} times as fast as fp32 on {device} and bf16 only "
            f"{bf16:.2g} times; O1 casts by operator and scales the loss. O2 stores the model in "
            "fp16, too."
        )
    if bf16 >= LEAST_GAIN:
        return "O4", (
            f"Start with O4: bf16 is {bf16:.2g} times as fast as fp32 on {device} and needs no "
            "loss scaling; O4 casts by operator. O5 stores the model in bf16, too."
        )
    return "O0", (
        f"Start with O0: bf16 is {bf16:.2g} times and fp16 {fp16:.2g} times as fast as fp32 on "
        f"{device}, too little to benefit."
    )


def _ratio(speeds: dict[str, dict[str, float]], dtype: str) -> float:
    """Returns the speed of a dtype relative to fp32, as the geometric mean over operators."""
    ratios = [each[dtype] / each["float32"] for each in speeds.values()]
    return statistics.geometric_mean(ratios) if all(ratios) else 0.0


def _measured(device: torch.device) -> dict[str, dict[str, float]]:
    return {name: _per_second(device, make) for name, make in WORK.items()}


def _per_second(device: torch.device, make: Callable[..., Any]) -> dict[str, float]:
    """Returns the operations per second of the fastest call in each dtype."""
    best: dict[str, float] = {}
    runs: dict[str, tuple[Callable[[], Tensor], int]] = {}
    for dtype in DTYPES:
        name = dtypes.name(dtype)
        best[name] = 0.0
        try:
            work, operations = make(device, dtype)
            work()  # the first call chooses an algorithm
            runs[name] = work, operations
        except (RuntimeError, NotImplementedError):  # not every device has every kernel
            continue
    for _ in range(ROUNDS):
        for name, (work, operations) in runs.items():
            end = time.perf_counter() + BUDGET / ROUNDS
            while True:
                best[name] = max(best[name], operations / max(seconds(work, device), 1e-9))
                if time.perf_counter() > end:
                    break
    return best


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], int]:
    size = 384 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device).to(dtype)
    return functools.partial(torch.mm, matrix, matrix), 2 * size**3


def _conv(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], int]:
    batch, channels, side = (4, 32, 28) if device.type == "cpu" else (64, 256, 56)
    images = torch.ones(batch, channels, side, side, device=device).to(dtype)
    weight = torch.ones(channels, channels, 3, 3, device=device).to(dtype)
    operations = 2 * batch * channels * channels * 9 * side * side
    return functools.partial(F.conv2d, images, weight, padding=1), operations


WORK = {"matmul": _matmul, "conv": _conv}
"""Makes each operator, with the floating-point operations of a call."""


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
    return ", ".join([name, threads, *(extensions or ["no 16-bit units"])])


def _speed_lines(health: Health) -> Iterator[str]:
    for device, what in health.devices.items():
        yield f"{device}: {what}"
        for work, by_dtype in health.speeds[device].items():
            base = by_dtype["float32"]
            cells = [
                f"{name} {speed / 1e9:,.0f} GFLOP/s ({speed / base:.2f}x)"
                if speed
                else f"{name} not supported"
                for name, speed in by_dtype.items()
            ]
            yield f"  {work:8}{', '.join(cells)}"
