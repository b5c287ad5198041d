"""How long each operator takes: by the host's clock, or by events on an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex._torch.copies import record

R = TypeVar("R")
Span = Callable[[], float]
"""Reads one measured span, in seconds; after ``Clock.finish``."""

aten = torch.ops.aten

# Views that do not call themselves so.
_SHARING = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk}


class Clock:
    """Measures the calls of equal passes on the host, by wall time.

    What runs as the same call of every pass takes the least of its times: other work on the machine
    falls on one of them only.

    Attributes:
        measures: What a span is, in words.
    """

    measures = "wall time around each operator on the host"

    def __init__(self) -> None:
        """Starts before the first pass."""
        self._passes: list[list[Span]] = []

    def begin(self) -> None:
        """Begins a pass."""
        self._passes.append([])

    def time(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> tuple[R, Span]:
        """Returns the call's result and how long it took."""
        result, measured = self._measure(call, *args, **kwargs)
        spans = self._passes[-1]
        index = len(spans)
        spans.append(measured)
        return result, lambda: self._least(index)

    def finish(self) -> None:
        """Makes every span readable."""

    def _measure(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> tuple[R, Span]:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - start
        return result, lambda: seconds

    def _least(self, index: int) -> float:
        last = self._passes[-1]
        return min(spans[index]() for spans in self._passes if len(spans) == len(last))


class DeviceClock(Clock):
    """Measures calls on an accelerator's queue, between two events around the operator.

    The queue is short while a recorder looks at every result, so a span holds the launch too where
    the device waits for the host: kernels under some 10 us look alike.
    """

    measures = "time between two events on the device around each operator, launch included"

    def __init__(self, device: torch.device) -> None:
        """Measures on the current queue of ``device``."""
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


class Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every operator that computes; views are let through. Once entered, one pass."""

    def __init__(self, clock: Clock) -> None:
        """Times by ``clock``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where composites arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.is_view or func._overloadpacket in _SHARING:
            return func(*args, **kwargs)
        result, span = self._clock.time(func, *args, **kwargs)
        self._observe(func, args, kwargs, result, span)
        return result

    def _observe(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, span: Span
    ) -> None:
        """Sees an operator that ran."""


def clock_for(device: torch.device) -> Clock:
    """Returns the clock for operators on ``device``."""
    return DeviceClock(device) if device.type in ("cuda", "xpu") else Clock()
