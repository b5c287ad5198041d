"""The speed of matrix products and convolutions in each dtype."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from apex._core import dtypes
from apex.tools.stopwatch import seconds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORK = ("matmul", "conv")
LEAST_CALLS = 2
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
    """

    device: str
    work: str
    dtype: str
    seconds: float | None
    flops: int
    error: str = ""

    @property
    def per_second(self) -> float:
        """Floating-point operations per second; 0 if the device does not support it."""
        return self.flops / self.seconds if self.seconds else 0.0


def measure(device: torch.device, *, budget: float = 0.2) -> list[Speed]:
    """Returns the speed of every operator in every dtype.

    Args:
        device: Device to measure.
        budget: Seconds per operator and dtype, beyond two calls.
    """
    return [_measured(device, work, dtype, budget) for work in WORK for dtype in DTYPES]


def ratio(speeds: list[Speed], device: str, dtype: str) -> float:
    """Returns the speed of a dtype relative to fp32, as the geometric mean over operators.

    It is 0 if one of them fails.

    Args:
        speeds: The result of :func:`measure`.
        device: The device.
        dtype: The dtype's name.
    """
    found = {(s.work, s.dtype): s.per_second for s in speeds if s.device == device}
    ratios = [found[work, dtype] / (found[work, "float32"] or _TINY) for work in WORK]
    return math.prod(ratios) ** (1 / len(ratios))


def _measured(device: torch.device, work: str, dtype: torch.dtype, budget: float) -> Speed:
    run, flops = (_matmul if work == "matmul" else _conv)(device, dtype)
    name = dtypes.name(dtype)
    try:
        fastest = _fastest(run, device, budget)
    except (RuntimeError, NotImplementedError) as error:  # not every device has every kernel
        return Speed(str(device), work, name, None, flops, str(error).partition("\n")[0])
    return Speed(str(device), work, name, fastest, flops)


def _fastest(run: Callable[[], Tensor], device: torch.device, budget: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + budget
    run()  # the first call chooses an algorithm
    while len(times) < LEAST_CALLS or time.perf_counter() < end:
        times.append(max(seconds(run, device), _TINY))
    return min(times)


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
