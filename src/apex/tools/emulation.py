"""Whether a machine computes natively in a dtype."""

from __future__ import annotations

import torch

from apex.tools.stopwatch import seconds

EMULATION_RATIO = 4.0
"""A dtype counts as emulated if its matrix product takes this many times as long as fp32's."""


def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the time of a matrix product in ``dtype`` relative to fp32 on ``device``.

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


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(256, 256, device=device).to(dtype)
    return min(seconds(lambda: matrix @ matrix, device) for _ in range(10))
