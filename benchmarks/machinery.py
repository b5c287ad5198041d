"""The overhead of amp itself: an iteration of many tiny layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.loops import Task, fused_adamw, native, with_amp
from benchmarks.measurement import Goal, Measurement, sampled
from benchmarks.race import race

NAME = "machinery"
LAYERS = 150


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields O1 against autocast and GradScaler in fp16, O4 against autocast in bf16.

    O4 also with a plain ``loss.backward()``, without a goal: nothing turns casts off in that pass,
    so that each product and sum in it calls a kernel in Python (docs/concepts/op_policy.md).
    """
    pairs = ("O1", torch.float16, True), ("O4", torch.bfloat16, True), ("O4", torch.bfloat16, False)
    for level, dtype, scaled in pairs:
        times = race(
            {
                "amp": partial(with_amp, TASK, level, scaled=scaled),
                "native": partial(native, TASK, dtype),
            },
            rounds=5,
            heats=2 if quick else 20,  # a process stays as fast as its memory happens to lie
            calls=8,
            warmup=40,  # past the blocks that are inspected for mistakes
            threads=1,
        )
        name = level if scaled else f"{level} without scale_loss"
        peer = "autocast + GradScaler" if dtype is torch.float16 else "autocast"
        ratios = times.ratios("amp", "native")
        goal = Goal("<=", 1.05) if scaled else None
        yield sampled(NAME, f"{name} / {peer}", ratios, "x", goal=goal)
        yield sampled(NAME, name, times.milliseconds("amp"), "ms")
        if scaled:
            yield sampled(NAME, peer, times.milliseconds("native"), "ms")


def _model() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*layers)


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randint(0, 8, (8,))


TASK = Task(_model, _batch, fused_adamw)
