"""Wall time of interleaved steps, their ratios with an interval, and how busy the machine is.

The interval of a median is that of the sign test: whatever the distribution, the number of values
below the true median is binomial with probability 1/2, so two order statistics enclose it.

Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from apex.debug.common import counted

CONFIDENCE = 0.95

LEAST_ROUNDS = 6
"""Fewest values for which an interval with this confidence exists."""

EMULATION_RATIO = 4.0
"""A dtype counts as emulated if its matrix product takes this many times as long as fp32's."""

BUSY = 1.5
"""Load per core above which the machine counts as busy; one program alone reaches 1."""

MOST_WAITING = 0.1
"""Share of the time that this process may wait for a core on a machine that is not busy."""

LEAST_SECONDS = 0.3
"""Seconds that are enough to measure the load, or an operator, among other programs."""

LEAST_REPEATS = 8
"""Repeats of an operator, of which the fastest counts."""

_SHORT = 100.0
"""Milliseconds of a step that is short. Steps of 12 ms of O4 took 1.035 to 1.06 of autocast's time
with four other levels' between them, and 1.006 to 1.035 after one of their own (two cores).
"""


@dataclass(frozen=True)
class Timing:
    """Milliseconds per training step, one sample per round, at least one."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median."""
        return median(self.samples)


@dataclass(frozen=True)
class Interval:
    """A median of measured values and the interval that holds the true one."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Returns it as a speed, such as ``"1.80x as fast as fp32 (0.90 to 2.60x)"``."""
        return f"{self.median:.2f}x as fast as fp32 ({self.low:.2f} to {self.high:.2f}x)"


@dataclass(frozen=True)
class Load:
    """How busy the machine was.

    Attributes:
        average: Processes that ran or waited, over the last minute; ``None`` if not reported.
        cores: Cores that this process may use.
        waiting: Share of the time that this process waited for a core; 0 if not reported.
    """

    average: float | None = None
    cores: int = 1
    waiting: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether other programs take time away from this one."""
        return (self.average or 0.0) > BUSY * self.cores or self.waiting > MOST_WAITING

    def __str__(self) -> str:
        """Returns, for instance, ``"load 17 on 2 cores"``."""
        load = "" if self.average is None else f"load {self.average:.2g} on "
        text = load + counted(self.cores, "core")
        if self.waiting > MOST_WAITING:
            text += f"; this process waited for a core {self.waiting:.0%} of the time"
        return text


def speed_of(ours: Timing, base: Timing) -> Interval | None:
    """Returns how many times as fast ``ours`` is; ``None`` below ``LEAST_ROUNDS`` samples.

    Samples are divided round by round, so that a load on a whole round cancels.
    """
    ratios = [b / o for b, o in zip(base.samples, ours.samples, strict=False)]
    return median_interval(ratios) if len(ratios) >= LEAST_ROUNDS else None


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median of at least ``LEAST_ROUNDS`` positive values and its interval."""
    ordered = sorted(values)
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(len(ordered), rank) / 2 ** len(ordered)) <= (
        1 - CONFIDENCE
    ) / 2:
        rank += 1
    return Interval(median(ordered), ordered[rank - 1], ordered[-rank])


class LoadMeter:
    """Measures the load from its creation on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited = _waited()

    @property
    def seconds(self) -> float:
        """Seconds that it has measured."""
        return time.perf_counter() - self._start

    @property
    def load(self) -> Load:
        """The load until now."""
        waits = [end - self._waited.get(thread, 0.0) for thread, end in _waited().items()]
        average = None
        with contextlib.suppress(AttributeError, OSError):  # Windows; a container may hide it
            average = os.getloadavg()[0]
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return Load(average, cores, max(waits, default=0.0) / self.seconds)


def current_load(device: torch.device) -> Load:
    """Returns the load while this process computes for a moment."""
    meter = LoadMeter()
    work = _matmul(torch.float32, device)
    while meter.seconds < LEAST_SECONDS:
        seconds(work, device)
    return meter.load


def _waited() -> dict[str, float]:
    """Returns the seconds that each thread of this process has waited for a core; Linux only."""
    waited = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return waited


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the wall time of ``work()``, including all device work it starts."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def time_interleaved(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> Iterator[dict[str, Timing]]:
    """Yields the times of each step so far, after a warm-up and after each round of one step each.

    Before each short step another of the same level runs, as in training: the others' code is in
    the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    latest = dict.fromkeys(steps, math.inf)
    for turn in range(rounds + 1):
        for name, step in steps.items():
            if latest[name] < _SHORT:
                step()
            latest[name] = seconds(step, device) * 1e3
            if turn > 0:  # the first one allocates the optimizer's state
                times[name].append(latest[name])
        yield {name: Timing(tuple(values)) for name, values in times.items() if values}


# -- the speed of a dtype --------------------------------------------------------------------------


@functools.cache
def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the time of the slower of two operators in ``dtype`` relative to fp32 on ``device``.

    Infinite if the device does not support one of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, waiting for a second thread hides the difference
    try:
        times = operator_seconds(dtype, device).values()
    finally:
        torch.set_num_threads(threads)
    return max(1 / least_ratio(pairs) if pairs else math.inf for pairs in times)


def operator_seconds(
    dtype: torch.dtype, device: torch.device
) -> dict[str, list[tuple[float, float]]]:
    """Returns the times of two operators in fp32 and in ``dtype``, which take turns.

    The operators are a matrix product, and a convolution with its gradients: some CPUs have fp16
    kernels for the first only. Without a kernel there are no times.
    """
    operators = {}
    for name, make in (("matmul", _matmul), ("conv", _conv)):
        times: list[tuple[float, float]] = []
        with contextlib.suppress(RuntimeError, NotImplementedError):  # the device lacks the kernel
            fp32, ours = make(torch.float32, device), make(dtype, device)
            ours()
            meter = LoadMeter()
            while len(times) < LEAST_REPEATS or meter.seconds < LEAST_SECONDS:
                times.append((seconds(fp32, device), seconds(ours, device)))
        operators[name] = times
    return operators


def least_ratio(times: Sequence[tuple[float, float]]) -> float:
    """Returns the least of the first times divided by the least of the second.

    Other programs only ever add time to a repeat, so the least of many is the hardware's own.
    """
    first, second = zip(*times, strict=True)
    return float(min(first) / min(second))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _matmul(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    size = 256 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return lambda: matrix @ matrix


def _conv(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    batch, channels, side = (8, 16, 16) if device.type == "cpu" else (64, 256, 56)
    image = torch.ones(batch, channels, side, side, dtype=dtype, device=device).requires_grad_()
    weight = torch.ones(channels, channels, 3, 3, dtype=dtype, device=device).requires_grad_()
    return lambda: torch.autograd.grad(torch.conv2d(image, weight).sum(), (image, weight))
