"""Whether a machine has arithmetic of its own for a dtype."""

from __future__ import annotations

import time

import torch

EMULATION_RATIO = 4.0
"""A dtype is emulated if its matrix product takes this many times that of fp32."""


def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the time of a matrix product in ``dtype`` over that in fp32 on ``device``.

    Raises:
        RuntimeError: If the device has no such product.
    """
    if dtype is torch.float32:
        return 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, waiting for a second thread hides the difference
    try:
        return _product_seconds(dtype, device) / _product_seconds(torch.float32, device)
    finally:
        torch.set_num_threads(threads)


def wait(device: torch.device) -> None:
    """Waits until ``device`` has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(256, 256, device=device).to(dtype)
    return min(_seconds(matrix) for _ in range(10))


def _seconds(matrix: torch.Tensor) -> float:
    wait(matrix.device)
    start = time.perf_counter()
    matrix @ matrix
    wait(matrix.device)
    return time.perf_counter() - start
