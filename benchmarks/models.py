"""A conv net, three small transformers and two large layers in bf16."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from benchmarks.loops import Batch, Task, device, fused_adamw, native, with_amp
from benchmarks.measurement import Goal, Measurement, sampled
from benchmarks.memory import kept_bytes
from benchmarks.race import race

NAME = "models"
LARGE = 5760
TIE = 1.02
"""Upper bound of the time relative to autocast, for O4, and for O5 except with large layers."""


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields O4 and O5 against native autocast, and the gain of both over O0.

    The ratio of autocast to itself shows how far noise alone moves a ratio from 1.
    """
    for name, task in TASKS.items():
        yield from _times(name, task, quick=quick)
        kept_by_autocast = _kept_under_autocast(task)
        ratio = _kept_at_o4(task) / kept_by_autocast
        yield Measurement(NAME, f"{name}, kept at O4 / autocast", ratio, "x", Goal("<=", 1.0))


def _times(name: str, task: Task, *, quick: bool) -> Iterator[Measurement]:
    racers = {
        "native": partial(native, task, torch.bfloat16),
        "twin": partial(native, task, torch.bfloat16),
    }
    for level in ("O0", "O4", "O5"):
        racers[level] = partial(with_amp, task, level)
    if quick:
        times = race(racers, rounds=3, heats=1, calls=1, warmup=2)
    else:
        times = race(racers, rounds=8, heats=3, calls=2, warmup=2)
    tie = Goal("<=", TIE)
    o5_goal = Goal("<=", 0.75) if name == "large layers" else tie
    gain = None if name in STEPPING else Goal(">=", 1.5)
    figures = (
        ("O4 / autocast", times.ratios("O4", "native"), tie),
        ("O5 / autocast", times.ratios("O5", "native"), o5_goal),
        ("autocast / autocast", times.ratios("twin", "native"), None),
        ("O0 / O4", times.ratios("O0", "O4"), gain),
        ("O0 / O5", times.ratios("O0", "O5"), gain),
    )
    for case, ratios, goal in figures:
        yield sampled(NAME, f"{name}, {case}", ratios, "x", goal=goal)
    for racer in ("O0", "native", "O4", "O5"):
        yield sampled(NAME, f"{name}, {racer}", times.milliseconds(racer), "ms", digits=1)


def _kept_under_autocast(task: Task) -> int:
    """Returns the bytes that a forward under autocast keeps, without an active session."""
    gc.collect()  # sessions of earlier cases end here
    model = task.model().to(device())
    inputs, labels = task.batch()
    with torch.autocast(device(), torch.bfloat16):
        return _kept(model, inputs, labels)


def _kept_at_o4(task: Task) -> int:
    model = task.model().to(device())
    inputs, labels = task.batch()
    model = amp.initialize(model, opt_level="O4", verbosity=0)
    return _kept(model, inputs, labels)


def _kept(model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    inputs = inputs.to(device())
    labels = labels.to(device())
    _, kept = kept_bytes(lambda: F.cross_entropy(model(inputs), labels))
    return kept


class Transformer(nn.Module):
    """An encoder over sequences of features, and a classifier of their mean."""

    def __init__(self, width: int = 512, layers: int = 2, activation: str = "relu") -> None:
        """Makes ``layers`` layers of ``width`` features."""
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, activation=activation, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.classifier = nn.Linear(width, 10)

    def forward(self, sequences: Tensor) -> Tensor:
        """Returns logits [N, 10] of ``sequences`` [N, length, width]."""
        logits: Tensor = self.classifier(self.encoder(sequences).mean(dim=1))
        return logits


def conv_net(width: int = 64) -> nn.Module:
    """Returns six convolutions with batch norm, and a classifier."""
    net = nn.Sequential()
    channels = 3
    for index, factor in enumerate((1, 1, 2, 2, 4, 4)):
        stride = 2 if index in (2, 4) else 1
        outputs = factor * width
        net.append(nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False))
        net.append(nn.BatchNorm2d(outputs))
        net.append(nn.ReLU())
        channels = outputs
    net.append(nn.AdaptiveAvgPool2d(1))
    net.append(nn.Flatten())
    net.append(nn.Linear(channels, 10))
    return net


def large_layers() -> nn.Module:
    """Returns two layers of 33 M parameters each; the step takes most of an iteration."""
    return nn.Sequential(nn.Linear(LARGE, LARGE), nn.ReLU(), nn.Linear(LARGE, LARGE))


def _batch(*shape: int) -> Batch:
    return torch.randn(shape), torch.randint(0, 10, shape[:1])


def _task(model: Callable[[], nn.Module], *shape: int) -> Task:
    return Task(model, partial(_batch, *shape), fused_adamw)


TASKS = {
    "conv net": _task(conv_net, 16, 3, 32, 32),
    "transformer": _task(Transformer, 16, 64, 512),
    "GELU transformer": _task(partial(Transformer, activation="gelu"), 16, 64, 512),
    "narrow transformer": _task(partial(Transformer, 384), 8, 32, 384),
    "large layers": _task(large_layers, 4, LARGE),
}
STEPPING = ("narrow transformer", "large layers")
"""Tasks that spend so much time in the step that casts gain little."""
