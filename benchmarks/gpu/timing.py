"""Times of work on a GPU, and on the host that queues it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def timed(work: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    """Returns median milliseconds: until the device has finished, and until the call returns."""
    for _ in range(3):
        work()
    device: list[float] = []
    host: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        device.append(time.perf_counter() - start)
    return {"ms": round(median(device) * 1e3, 3), "host ms": round(median(host) * 1e3, 3)}
