"""A layer that the script calls in a loop, as in backpropagation through time, in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apex import amp
from benchmarks.loops import device
from benchmarks.measurement import Goal, Measurement, sampled
from benchmarks.memory import kept_bytes
from benchmarks.race import Work, race

NAME = "loops"
CALLS = 24
WIDTH = 512


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields the bytes kept for the backward pass per weight, and the time of a forward and it."""
    for name in LAYERS:
        kept = kept_per_weight(name, casts_by_amp=True)
        most = Goal("<=", round(kept_per_weight(name, casts_by_amp=False), 1))
        yield Measurement(NAME, f"{name}, kept per weight at O4", kept, "bytes", most)
        racers = {"amp": partial(_loop, name, True), "native": partial(_loop, name, False)}
        times = race(racers, rounds=5, heats=1 if quick else 4, calls=2, threads=1)
        ratios = times.ratios("amp", "native")
        yield sampled(NAME, f"{name}, O4 / autocast", ratios, "x", goal=Goal("<=", 1.05))
        yield sampled(NAME, f"{name}, O4", times.milliseconds("amp"), "ms")


def kept_per_weight(name: str, *, casts_by_amp: bool) -> float:
    """Returns the bytes that the graph of a loop keeps, by the number of weights."""
    forward, weights, _model = _forward(name, casts_by_amp)
    _, kept = kept_bytes(forward)
    return kept / weights


def _loop(name: str, casts_by_amp: bool) -> Work:
    forward, _, model = _forward(name, casts_by_amp)

    def work() -> object:
        loss = forward().sum()
        block: Any = nullcontext(loss)
        if casts_by_amp:
            block = amp.scale_loss(loss, [])
        with block as scaled_loss:
            scaled_loss.backward()
        for param in model.parameters():
            param.grad = None
        return model

    return work


def _forward(name: str, casts_by_amp: bool) -> tuple[Callable[[], Tensor], int, nn.Module]:
    torch.manual_seed(0)
    model = LAYERS[name]().to(device())
    weights = sum(param.numel() for param in model.parameters())
    state = torch.randn(2, WIDTH, device=device(), requires_grad=True)
    if casts_by_amp:
        model = amp.initialize(model, opt_level="O4", verbosity=0)

    def forward() -> Tensor:
        x = state
        casts: Any = nullcontext()
        if not casts_by_amp:
            casts = torch.autocast(device(), torch.bfloat16, cache_enabled=True)
        with casts:
            for _ in range(CALLS):
                x = model(x).float()
        return x

    return forward, weights, model


class _Layer(nn.Module):
    """A layer, from a state to the next one."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: _Layer(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x).tanh()),
    "product": lambda: _Layer(nn.Linear(WIDTH, WIDTH), lambda layer, x: (x @ layer.weight).tanh()),
    "GRUCell": lambda: _Layer(nn.GRUCell(WIDTH, WIDTH), lambda layer, x: layer(x, x)),
    "LSTMCell": lambda: _Layer(nn.LSTMCell(WIDTH, WIDTH), lambda layer, x: layer(x)[0]),
    "Conv1d": lambda: _Layer(
        nn.Conv1d(WIDTH, WIDTH, 1), lambda layer, x: layer(x[..., None])[..., 0].tanh()
    ),
}
