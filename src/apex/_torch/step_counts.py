"""The step counts of torch's fused optimizers on a CPU, raised in a third of the time.

torch keeps one 0-d tensor per parameter and adds the number 1 to each, which becomes a tensor
anew every time: 0.47 ms for 300 parameters, of the 1.05 ms of AdamW's step over small ones (torch
2.13). With one tensor for all of them it is 0.15 ms. torch's foreach optimizers do the same.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._torch import dispatcher
from apex._torch.dynamo import untraced

_OP = "_foreach_add_.Scalar"
_LEAST = 8
"""Parameters of a group from which on it pays: AdamW's step over 4 took 1.0 of the time, 8 0.9."""

_dtype = operator.attrgetter("dtype")

_lock = threading.Lock()
_registered: list[Callable[[], None]] = []


def raise_together(optimizer: Optimizer) -> None:
    """Has torch add 1 to all tensors of a list at once, if the optimizer steps so on a CPU."""
    fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    params = [*chain.from_iterable(fused)]
    if len(params) >= _LEAST * max(1, len(fused)) and params[0].device.type == "cpu":
        _register()


def _register() -> None:
    """Registers a kernel where torch has none of its own; its results have the same bits.

    Once and for good: a step may be running whenever its optimizer's last reference goes.
    """
    with _lock:
        if not dispatcher.has_kernel(f"aten::{_OP}", "CPU"):
            _registered.append(_registration())


def _registration() -> Callable[[], None]:
    """Returns what would remove the kernel, and keeps it until then."""
    fallback = dispatcher.kernel_of(_OP, "CPU")
    one = torch.ones((), dtype=torch.float32, device="cpu")

    @untraced
    def add_(keyset: Any, tensors: list[Tensor], number: Any) -> None:
        alike = type(number) in (int, float) and number == 1
        if alike and list(map(_dtype, tensors)).count(torch.float32) == len(tensors):
            torch._foreach_add_(tensors, one, alpha=number)  # without alpha, one is a number
        elif fallback is not None:
            fallback.call_boxed(keyset, tensors, number)
        else:
            for each in tensors:  # as torch's own kernel does
                each.add_(number)

    return dispatcher.register({_OP: add_}, "CPU")
