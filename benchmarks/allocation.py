"""The most bytes that some work allocates at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile


def growth(work: Callable[[], object], device: torch.device) -> int | None:
    """Returns the most bytes allocated at once during ``work``, in addition to those before it.

    On CUDA, the allocator counts them. On a CPU, torch's profiler does, which slows ``work`` down.
    ``None`` for other devices.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    record: Any = profile(profile_memory=True)
    with _without_log():
        record.__enter__()
    try:
        work()
    finally:
        with _without_log():
            record.__exit__(None, None, None)
    if record.kineto_results is None:  # a build of torch without Kineto
        return None
    events = [event for event in record.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak: int = max(itertools.accumulate((event.nbytes() for event in events), initial=0))
    return peak


@contextmanager
def _without_log() -> Iterator[None]:
    """Discards what C++ writes to standard error: torch's profiler logs its start and its end."""
    try:
        kept = os.dup(2)
    except OSError:  # the shell has closed it
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
