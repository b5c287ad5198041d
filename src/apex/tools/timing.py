"""Wall time of work on a device, and of the interleaved steps of variants."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from apex.tools.results import Timing
from apex.tools.trainers import Trainer


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the wall time of ``work()``, including all device work it starts."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def time_interleaved(
    trainers: Mapping[str, Trainer],
    batch: Any,
    rounds: Mapping[str, int],
    *,
    device: torch.device,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Returns the time of a training step of each trainer, after one warm-up step.

    Steps are interleaved, so that load on the machine affects all variants alike.

    Args:
        trainers: By name.
        batch: The batch of every step, on the device.
        rounds: Number of timed steps, by name.
        device: Synchronized before and after each step.
        on_step: Called after each step, warm-up included.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(-1, max(rounds.values(), default=0)):
        for name, trainer in trainers.items():
            if turn < rounds[name]:
                milliseconds = seconds(functools.partial(_step, trainer, batch), device) * 1e3
                if turn >= 0:  # the first one allocates the optimizer's state
                    times[name].append(milliseconds)
                on_step()
    return {name: Timing(tuple(values)) for name, values in times.items() if values}


def _step(trainer: Trainer, batch: Any) -> None:
    trainer.backward(batch)
    trainer.step()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
