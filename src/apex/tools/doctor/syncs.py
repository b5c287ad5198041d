"""Counts the host syncs in a step of each fused optimizer."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "torch.optim.AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True),
    "torch.optim.SGD(momentum, fused=True)": lambda params: torch.optim.SGD(
        params, lr=1e-3, momentum=0.9, fused=True
    ),
    "apex.optimizers.FusedAdam": FusedAdam,
    "apex.optimizers.FusedLAMB": FusedLAMB,
    "apex.optimizers.FusedSGD": lambda params: FusedSGD(params, lr=1e-3, momentum=0.9),
}

READS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
STEPS_BEFORE = 2
"""Steps that set up state before the measured one."""


class _HostReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def host_reads(device: torch.device) -> dict[str, int]:
    """Returns how often one step reads a tensor on the host under a dynamic scale, by optimizer.

    On an accelerator each read waits for the device. The loss scale is dynamic, as fp16 needs it,
    but the dtype is bf16, which is fast everywhere.
    """
    found = {}
    for name, make in OPTIMIZERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = _reads_of_a_step(make, device)
        gc.collect()  # ends the session and its casts
    return found


def _reads_of_a_step(make: Make, device: torch.device) -> int:
    verbosity = amp._amp_state.verbosity
    model = nn.Linear(8, 8).to(device)
    model, optimizer = amp.initialize(
        model, make(model.parameters()), opt_level="O4", loss_scale="dynamic", verbosity=0
    )
    try:
        for _ in range(STEPS_BEFORE + 1):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8, device=device)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()  # type: ignore[no-untyped-call]
            reads = _HostReads()
            with reads:
                optimizer.step()
    finally:
        amp.restore(model, optimizer)
        amp._amp_state.verbosity = verbosity
    return reads.count
