"""Detects dtypes that a machine emulates."""

from __future__ import annotations

import torch

from apex.tools.timing import seconds

EMULATION_RATIO = 4.0
"""A dtype counts as emulated if its matrix product takes this many times as long as fp32's."""


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


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(256, 256, device=device).to(dtype)
    return min(seconds(lambda: matrix @ matrix, device) for _ in range(10))


def _convolution_seconds(dtype: torch.dtype, device: torch.device) -> float:
    image = torch.ones(8, 16, 16, 16, device=device).to(dtype).requires_grad_()
    weight = torch.ones(16, 16, 3, 3, device=device).to(dtype).requires_grad_()

    def forward_and_backward() -> None:
        torch.autograd.grad(torch.conv2d(image, weight).sum(), (image, weight))

    return min(seconds(forward_and_backward, device) for _ in range(3))
