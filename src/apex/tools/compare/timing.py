"""Measures interleaved steps, the ratios of their times, and the load of the machine.

The confidence interval of a median is the sign test's. For any distribution, the number of values
below the true median is binomial with probability 1/2, so two order statistics enclose it.

Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from apex.debug.common import counted

CONFIDENCE = 0.95

LEAST_ROUNDS = 6
"""Fewest values for which an interval with this confidence exists."""

BUSY = 1.5
"""Load per core above which the machine counts as busy; a single program reaches 1."""

LEAST_SECONDS = 0.3
"""Least seconds of repeats of an operator, to find a moment without other programs."""

LEAST_REPEATS = 8
"""Fewest repeats of an operator; the fastest counts."""

_SHORT = 100.0
"""Milliseconds below which a step is short, and timed only after another one of its level.

Without that step, O4's steps of 12 ms took 1.035 to 1.06 times as long as autocast's. With it, they
took 1.006 to 1.035 times as long (two cores, five levels).
"""


Work = Callable[[], object]
"""A function to time."""

Times = list[tuple[float, float]]
"""Seconds of an operator in fp32 and in another dtype, one pair for each repeat."""


@dataclass(frozen=True)
class Interval:
    """A median of measured values, and the confidence interval of the true median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Returns it as a speed, such as ``"1.80x as fast as fp32 (0.90 to 2.60x)"``."""
        return f"{self.median:.2f}x as fast as fp32 ({self.low:.2f} to {self.high:.2f}x)"


@dataclass(frozen=True)
class Load:
    """The load of the machine.

    Attributes:
        average: Mean number of processes that ran or waited in the last minute; 0 if not reported.
        cores: Cores of the machine.
    """

    average: float
    cores: int

    @property
    def busy(self) -> bool:
        """Whether other programs take time away from this one."""
        return self.average > BUSY * self.cores

    def __str__(self) -> str:
        """Returns, for instance, ``"load 17 on 2 cores"``."""
        return f"load {self.average:.2g} on {counted(self.cores, 'core')}"


def current_load() -> Load:
    """Returns the load of the machine."""
    average = 0.0
    with contextlib.suppress(AttributeError, OSError):  # Windows; a container may hide it
        average = os.getloadavg()[0]
    return Load(average, os.cpu_count() or 1)


@contextlib.contextmanager
def suited_threads(load: Load) -> Iterator[None]:
    """Computes in one thread on a busy machine, where several mostly wait for one another."""
    threads = torch.get_num_threads()
    if load.busy:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def speed_of(times: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Returns how many times as fast as ``base`` a level is; ``None`` below ``LEAST_ROUNDS`` times.

    Times are divided round by round, so that a load on a whole round cancels.
    """
    ratios = [*map(operator.truediv, base, times)]
    if len(ratios) < LEAST_ROUNDS:
        return None
    return median_interval(ratios)


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median of at least ``LEAST_ROUNDS`` positive values and its interval."""
    ordered = sorted(values)
    count = len(ordered)
    rank = 0
    tail = 1 / 2**count  # the probability that at most ``rank`` values are below the true median
    while tail <= (1 - CONFIDENCE) / 2:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    return Interval(median(ordered), ordered[rank - 1], ordered[-rank])


def seconds(work: Work, device: torch.device) -> float:
    """Returns the wall time of ``work()``, including all device work it starts."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def time_interleaved(
    steps: Mapping[str, Work], turns: Iterable[object], device: torch.device
) -> dict[str, tuple[float, ...]]:
    """Returns the milliseconds of each step in every turn except the first, which warms up.

    Another step of the same level precedes each short step, because the caches contain the other
    levels' code. In training they contain the level's own.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in turns:
        for name, step in steps.items():
            earlier = times[name]
            if earlier and earlier[-1] < _SHORT:
                step()
            earlier.append(seconds(step, device) * 1e3)
    # The first turn warms up.
    return {name: tuple(values[1:]) for name, values in times.items()}


# -- the speed of a dtype --------------------------------------------------------------------------


def operator_seconds(dtype: torch.dtype, device: torch.device) -> dict[str, Times]:
    """Returns the times of two operators in fp32 and in ``dtype``; without a kernel, no times.

    The operators are a matrix product, and a convolution with its gradients. Some CPUs have fp16
    kernels only for the first.
    """
    by_operator = {}
    for name, make in (("matmul", _matmul), ("conv", _conv)):
        times: Times = []
        with contextlib.suppress(RuntimeError):  # the device lacks the kernel
            fp32 = make(torch.float32, device)
            low_precision = make(dtype, device)
            end = time.perf_counter() + LEAST_SECONDS
            while len(times) < LEAST_REPEATS or time.perf_counter() < end:
                fp32_seconds = seconds(fp32, device)
                low_precision_seconds = seconds(low_precision, device)
                times.append((fp32_seconds, low_precision_seconds))
        by_operator[name] = times
    return by_operator


def least_ratio(times: Times) -> float:
    """Returns the least time in fp32 divided by the least time in the dtype.

    Other programs only ever add time to a repeat, so the least of many is the hardware's own.
    """
    fp32, low_precision = zip(*times, strict=True)
    return float(min(fp32) / min(low_precision))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _matmul(dtype: torch.dtype, device: torch.device) -> Work:
    size = 256 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return lambda: matrix @ matrix


def _conv(dtype: torch.dtype, device: torch.device) -> Work:
    shape = (8, 16, 16, 16) if device.type == "cpu" else (64, 256, 56, 56)
    channels = shape[1]
    image = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
    kernel = (channels, channels, 3, 3)
    weight = image.new_ones(kernel, requires_grad=True)

    def work() -> object:
        loss = torch.conv2d(image, weight).sum()
        return torch.autograd.grad(loss, (image, weight))

    return work
