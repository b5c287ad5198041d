"""Host syncs per steady training iteration."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.counting import counted_syncs, refused_syncs
from benchmarks.loops import MakeOptimizer, Task, native, plain, with_amp
from benchmarks.measurement import Goal, Measurement
from benchmarks.race import Work

NAME = "syncs"
LEVELS = ("O1", "O2", "O4", "O5")
ITERATIONS = 5

FUSED: dict[str, MakeOptimizer] = {
    "fused Adam": partial(torch.optim.Adam, fused=True),
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "fused SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
}
OTHER: dict[str, MakeOptimizer] = {
    "foreach Adam": partial(torch.optim.Adam, foreach=True),
    "RMSprop": torch.optim.RMSprop,
}


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields syncs per iteration: amp at each level, and GradScaler for comparison.

    With an optimizer that is not fused, the syncs of the plain loop are subtracted. On the CPU,
    torch's own optimizers read their step counts.
    """
    for name, optimizer in FUSED.items():
        task = Task(_model, _batch, optimizer)
        for level in LEVELS[2:] if quick else LEVELS:
            count = syncs_per_iteration(with_amp(task, level), refuse=True)
            yield _row(f"{level}, {name}", count, Goal("==", 0))
        yield _row(f"GradScaler, {name}", syncs_per_iteration(native(task, torch.float16)))
    for name, optimizer in OTHER.items():
        task = Task(_model, _batch, optimizer)
        own = syncs_per_iteration(plain(task))
        for level in LEVELS[2:] if quick else LEVELS:
            count = syncs_per_iteration(with_amp(task, level)) - own
            yield _row(f"{level}, {name}", count, Goal("<=", 1))
        count = syncs_per_iteration(native(task, torch.float16)) - own
        yield _row(f"GradScaler, {name}", count)


def syncs_per_iteration(work: Work, *, refuse: bool = False) -> float:
    """Returns the mean over some iterations that follow the first two.

    Args:
        work: One whole iteration.
        refuse: Whether CUDA raises an error at any sync.
    """
    gc.collect()  # sessions of earlier cases end here
    for _ in range(2):
        work()
    with counted_syncs() as counts:
        for _ in range(ITERATIONS):
            work()
    if refuse:
        with refused_syncs():
            work()
    return sum(counts.values()) / ITERATIONS


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(0, 10, (8,))


def _row(case: str, count: float, goal: Goal | None = None) -> Measurement:
    return Measurement(NAME, case, count, "per iteration", goal, digits=1)
