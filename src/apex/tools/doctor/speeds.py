"""The speed of matrix products and convolutions in each dtype.

Note [Rounds]
    The dtypes take turns, a short slice of time each, so that a load on the machine meets all of
    them. The best call of all rounds is the speed; the best calls of single rounds show how far it
    can be trusted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from apex._core import dtypes
from apex.tools.paired import Interval, median_interval
from apex.tools.timing import seconds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDS = 10
"""Turns of each dtype; an interval of 95 % then leaves out the lowest and the highest."""
_TINY = 1e-9
"""Seconds; below the resolution of any clock."""


@dataclass(frozen=True)
class Speed:
    """One operator in one dtype on one device.

    Attributes:
        device: Such as ``"cpu"``.
        work: ``"matmul"`` or ``"conv"``.
        dtype: Such as ``"bfloat16"``.
        seconds: Time of the fastest call; None if the device does not support it.
        flops: Floating-point operations of a call.
        error: Why the device does not support it; empty if it does.
        rounds: Time of the fastest call in each round.
    """

    device: str
    work: str
    dtype: str
    seconds: float | None
    flops: int
    error: str = ""
    rounds: tuple[float, ...] = ()

    @property
    def per_second(self) -> float:
        """Floating-point operations per second; 0 if the device does not support it."""
        return self.flops / self.seconds if self.seconds else 0.0


def measure(device: torch.device, *, budget: float = 0.2) -> list[Speed]:
    """Returns the speed of every operator in every dtype; see Note [Rounds].

    Args:
        device: Device to measure.
        budget: Seconds per operator and dtype; each gets at least one call a round.
    """
    return [speed for work in WORK for speed in _measured(device, work, budget)]


def ratio(speeds: list[Speed], device: str, dtype: str) -> Interval:
    """Returns the speed of a dtype relative to fp32, as the geometric mean over operators.

    The median is that of the best calls; it is 0 if the device does not support an operator.
    Without rounds, the interval is that one value.
    """
    found = {(s.work, s.dtype): s for s in speeds if s.device == device}
    pairs = [(found[work, "float32"], found[work, dtype]) for work in WORK]
    best = _mean([ours.per_second / (base.per_second or _TINY) for base, ours in pairs])
    turns = min((len(speed.rounds) for pair in pairs for speed in pair), default=0)
    if not best or not turns:
        return Interval(best, best, best)
    spread = median_interval(
        [
            _mean([base.rounds[turn] / ours.rounds[turn] for base, ours in pairs])
            for turn in range(turns)
        ]
    )
    return Interval(best, min(best, spread.low), max(best, spread.high))


def _mean(ratios: list[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


def _measured(device: torch.device, work: str, budget: float) -> list[Speed]:
    runs: dict[str, Callable[[], Tensor]] = {}
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    flops = 0
    for dtype in DTYPES:
        name = dtypes.name(dtype)
        try:
            runs[name], flops = WORK[work](device, dtype)
            _fastest(runs[name], device, 0.0)  # the first call chooses an algorithm
        except (RuntimeError, NotImplementedError) as error:  # not every device has every kernel
            errors[name] = str(error).partition("\n")[0]
            runs.pop(name, None)
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times.setdefault(name, []).append(_fastest(run, device, budget / ROUNDS))
    return [
        Speed(str(device), work, name, min(times[name]), flops, "", tuple(times[name]))
        if name in times
        else Speed(str(device), work, name, None, flops, errors[name])
        for name in map(dtypes.name, DTYPES)
    ]


def _fastest(run: Callable[[], Tensor], device: torch.device, budget: float) -> float:
    end = time.perf_counter() + budget
    fastest = seconds(run, device)
    while time.perf_counter() < end:
        fastest = min(fastest, seconds(run, device))
    return max(fastest, _TINY)


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], int]:
    size = 384 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device).to(dtype)
    return (lambda: matrix @ matrix), 2 * size**3


def _conv(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], int]:
    batch, channels, side = (4, 32, 28) if device.type == "cpu" else (64, 256, 56)
    images = torch.ones(batch, channels, side, side, device=device).to(dtype)
    weight = torch.ones(channels, channels, 3, 3, device=device).to(dtype)
    flops = 2 * batch * channels * channels * 9 * side * side
    return (lambda: F.conv2d(images, weight, padding=1)), flops


WORK = {"matmul": _matmul, "conv": _conv}
"""Makes each operator, with the floating-point operations of a call."""
