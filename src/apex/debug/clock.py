"""How long each operator takes: by the host's clock, or by events on an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from apex._torch.copies import record

R = TypeVar("R")
Span = Callable[[], float]
"""Returns one measured time, in seconds; call it after ``Clock.finish``."""


class Clock:
    """Times each call of several identical passes on the host, by wall time.

    A call's time is its least over all passes: other work on the machine slows down some of them.

    Attributes:
        measures: What a time is, in words, for reports.
    """

    measures = "wall time around each operator on the host"

    def __init__(self) -> None:
        self._passes: list[list[Span]] = []

    def begin(self) -> None:
        """Begins a pass."""
        self._passes.append([])

    def time(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> tuple[R, Span]:
        """Returns the call's result and its time."""
        result, measured = self._measure(call, *args, **kwargs)
        spans = self._passes[-1]
        index = len(spans)
        spans.append(measured)
        return result, lambda: self._least(index)

    def finish(self) -> None:
        """Makes every time readable."""

    def _measure(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> tuple[R, Span]:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - start
        return result, lambda: seconds

    def _least(self, index: int) -> float:
        last = self._passes[-1]
        return min(spans[index]() for spans in self._passes if len(spans) == len(last))


class DeviceClock(Clock):
    """Times each call on an accelerator, between two events on the device's current stream.

    A recorder inspects every result, so the device often waits for the host; a time then includes
    the launch, and kernels below about 10 us look alike.
    """

    measures = "time between two events on the device around each operator, launch included"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def finish(self) -> None:
        """Waits for the device."""
        torch.accelerator.synchronize(self._device)  # sync: a report, after the run

    def _measure(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> tuple[R, Span]:
        start = record(self._device, timing=True)
        result = call(*args, **kwargs)
        end = record(self._device, timing=True)
        return result, lambda: float(start.elapsed_time(end)) / 1000.0


def clock_for(device: torch.device) -> Clock:
    """Returns the clock for operators on ``device``."""
    return DeviceClock(device) if device.type in ("cuda", "xpu") else Clock()
