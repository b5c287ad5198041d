"""Models of many tensors: ``initialize``, ``state_dict`` and ``add_param_group`` at O5."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import nn

from apex import amp
from benchmarks.measurement import Goal, Measurement, sampled

NAME = "tensors"
COUNTS = (1_000, 3_000, 10_000)


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields the times for models of growing size, and of native ``state_dict``.

    CPU time, so that a busy machine matters less. torch's ``state_dict`` computes nothing; amp's
    compares each weight with its master, as writes through ``data`` are not counted.
    """
    counts = COUNTS[: 2 if quick else 3]
    per_tensor: list[float] = []
    for count in counts:
        model = network(count)
        native = network(count)
        optimizer = torch.optim.AdamW(model.parameters())
        prepare = partial(amp.initialize, model, optimizer, opt_level="O5", verbosity=0)
        microseconds = _once(prepare) * 1e6 / count
        per_tensor.append(microseconds)
        rounds = range(5 if quick else 15)
        ratios = [_once(model.state_dict) / _once(native.state_dict) for _ in rounds]
        case = f"{count:,} tensors"
        yield Measurement(NAME, f"{case}, initialize", microseconds, "us/tensor", digits=1)
        yield sampled(NAME, f"{case}, state_dict / native", ratios, "x", goal=Goal("<=", 6.0))
        yield Measurement(NAME, f"{case}, a new head's group", _of_heads(model, optimizer), "ms")
    case = f"initialize, a tensor of {counts[-1]:,} / of {counts[0]:,}"
    yield Measurement(NAME, case, per_tensor[-1] / per_tensor[0], "x", goal=Goal("<=", 1.5))


def network(count: int) -> nn.Module:
    """Returns a model with ``count`` tensors in blocks of eight."""
    body = nn.Sequential()
    for _ in range(count // 8):
        block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
        body.append(block)
    return nn.ModuleDict({"body": body})


def _of_heads(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Returns how much longer ``add_param_group`` takes for a new head than torch's own."""

    def add(name: str) -> None:
        model[name] = nn.Linear(8, 8)
        optimizer.add_param_group({"params": model[name].parameters()})

    names = iter(f"head{index}" for index in range(100))
    params = list(amp.master_params(optimizer))
    plain = torch.optim.AdamW(params)

    def add_to_plain() -> None:
        plain.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    native = _milliseconds(add_to_plain)
    return _milliseconds(lambda: add(next(names))) - native


def _milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    return median(_once(call) for _ in range(repeats)) * 1e3


def _once(call: Callable[[], object]) -> float:
    """Returns the seconds of a call without garbage collection, as ``timeit`` does.

    The time of a collection grows with the number of objects in the process.
    """
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        call()
        return time.process_time() - start
    finally:
        gc.enable()
