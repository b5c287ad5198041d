"""Wall time of work on a device, of the interleaved steps of variants, of dtypes against fp32."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from apex.tools.results import Timing
from apex.tools.trainers import Trainer

EMULATION_RATIO = 4.0
"""A dtype counts as emulated if its matrix product takes this many times as long as fp32's."""

_SHORT = 100.0
"""Milliseconds of a step that is short. Steps of 12 ms of O4 took 1.035 to 1.06 of autocast's time
with four other variants' between them, and 1.006 to 1.035 after one of their own (two cores).
"""


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

    Steps are interleaved, so that load on the machine affects all variants alike. Before each short
    one runs another of the same trainer, as in training: the others' code is in the caches.

    Args:
        trainers: By name.
        batch: The batch of every step, on the device.
        rounds: Number of timed steps, by name.
        device: Synchronized before and after each step.
        on_step: Called after each step, warm-up included.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}
    latest = dict.fromkeys(trainers, math.inf)
    for turn in range(-1, max(rounds.values(), default=0)):
        for name, trainer in trainers.items():
            if turn < rounds[name]:
                if latest[name] < _SHORT:
                    _step(trainer, batch)
                latest[name] = seconds(functools.partial(_step, trainer, batch), device) * 1e3
                if turn >= 0:  # the first one allocates the optimizer's state
                    times[name].append(latest[name])
                on_step()
    return {name: Timing(tuple(values)) for name, values in times.items() if values}


def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the time of the slower of two operators in ``dtype`` relative to fp32 on ``device``.

    These are a matrix product and the gradients of a convolution; some CPUs have fp16 kernels for
    the first only.

    Raises:
        RuntimeError: If the device does not support one of them.
    """
    if dtype is torch.float32:
        return 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, waiting for a second thread hides the difference
    try:
        return max(
            measured(dtype, device) / measured(torch.float32, device)
            for measured in (_product_seconds, _convolution_seconds)
        )
    finally:
        torch.set_num_threads(threads)


def _step(trainer: Trainer, batch: Any) -> None:
    trainer.backward(batch)
    trainer.step()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(256, 256, device=device).to(dtype)
    return min(seconds(lambda: matrix @ matrix, device) for _ in range(10))


def _convolution_seconds(dtype: torch.dtype, device: torch.device) -> float:
    image = torch.ones(8, 16, 16, 16, device=device).to(dtype).requires_grad_()
    weight = torch.ones(16, 16, 3, 3, device=device).to(dtype).requires_grad_()

    def forward_and_backward() -> None:
        torch.autograd.grad(torch.conv2d(image, weight).sum(), (image, weight))

    return min(seconds(forward_and_backward, device) for _ in range(3))
