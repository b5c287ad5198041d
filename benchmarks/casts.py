"""The cost of one operator inside a cast region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from apex import amp
from benchmarks.loops import device
from benchmarks.measurement import Goal, Measurement, sampled
from benchmarks.race import Times, Work, race

NAME = "casts"
CALLS = 500
MOST = 5.0
"""Microseconds that a filled operator may add to the same casts written out."""

Operator = Callable[[Tensor], Tensor]


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields microseconds per call of one filled operator, and of one outside the table."""
    rounds = 10 if quick else 60
    filled = _race(torch.exp, _written_out, rounds)
    yield from _rows("exp of bf16", filled, "float().exp()", Goal("<=", MOST))
    other = _race(torch.abs, torch.abs, rounds)
    yield from _rows("abs of bf16 (not in the table)", other, "autocast", Goal("<=", 0.2))


def _rows(case: str, times: Times, peer: str, goal: Goal) -> Iterator[Measurement]:
    ours = [seconds * 1e6 / CALLS for seconds in times.samples["amp"]]
    theirs = [seconds * 1e6 / CALLS for seconds in times.samples["native"]]
    added = [our - their for our, their in zip(ours, theirs, strict=True)]
    yield sampled(NAME, f"{case}, added", added, "us", goal=goal)
    yield sampled(NAME, f"{case}, O4", ours, "us")
    yield sampled(NAME, f"{case}, {peer}", theirs, "us")


def _race(ours: Operator, peers: Operator, rounds: int) -> Times:
    return race(
        {"amp": partial(_in_amp, ours), "native": partial(_in_autocast, peers)},
        rounds=rounds,
        calls=5,
        threads=1,
    )


def _in_amp(operator: Operator) -> Work:
    model: nn.Module = amp.initialize(nn.Linear(1, 1).to(device()), opt_level="O4", verbosity=0)
    tensor = _tensor()

    def work() -> nn.Module:
        for _ in range(CALLS):
            operator(tensor)
        return model  # the casts live as long as it does

    return work


def _in_autocast(operator: Operator) -> Work:
    tensor = _tensor()

    def work() -> None:
        with torch.autocast(device(), torch.bfloat16):
            for _ in range(CALLS):
                operator(tensor)

    return work


def _written_out(tensor: Tensor) -> Tensor:
    return tensor.float().exp()


def _tensor() -> Tensor:
    return torch.rand(16, device=device()).bfloat16()
