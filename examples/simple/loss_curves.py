"""Compares loss curves: fp32, torch.amp and apex.amp from the same weights on the same batches.

python examples/simple/loss_curves.py
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from apex import amp

Step = Callable[[Tensor, Tensor], Tensor]  # images, labels -> loss, after training on them


@dataclass(frozen=True)
class Curve:
    """Compares one way of training with fp32, over several seeds.

    Attributes:
        final: Mean loss of the last tenth of the steps.
        apart: Mean distance between the losses of a step here and in fp32 with the same seed.
    """

    final: float
    apart: float


def fp32(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Trains without amp."""
    return plain_step(model, optimizer, dtype=None)


def torch_bf16(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Trains with ``torch.autocast`` in bf16."""
    return plain_step(model, optimizer, dtype=torch.bfloat16)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None
) -> Step:
    """Returns a training step under ``torch.autocast`` to ``dtype``, or in fp32."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        cast = torch.autocast(images.device.type, dtype) if dtype else nullcontext()
        with cast:
            loss = F.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def torch_fp16(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Trains with ``torch.autocast`` in fp16 and ``GradScaler``."""
    device_type = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(device_type)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.float16):
            loss = F.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def apex_level(level: str) -> Callable[[nn.Module, torch.optim.Optimizer], Step]:
    """Returns a way of training with amp at ``level``."""

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(model(images).float(), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            return loss

        return step

    return prepare


WAYS: Mapping[str, Callable[[nn.Module, torch.optim.Optimizer], Step]] = {
    "fp32": fp32,
    "torch.amp fp16": torch_fp16,
    "O1": apex_level("O1"),
    "O2": apex_level("O2"),
    "O3": apex_level("O3"),
    "torch.amp bf16": torch_bf16,
    "O4": apex_level("O4"),
    "O5": apex_level("O5"),
}


def build_model(seed: int, device: str) -> nn.Module:
    """Returns a small net with batch norm; the same ``seed`` gives the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU()),
        *(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)),
    ).to(device)


def batches(steps: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ``steps`` batches of 32 digits [32, 64] with labels [32]."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32).div(16).to(device)
    labels = torch.tensor(digits.target).to(device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (32,), generator=generator).to(device)
        yield images[chosen], labels[chosen]


def losses(way: str, *, seed: int, steps: int, device: str, order: int) -> list[float]:
    """Returns each step's loss; ``seed`` sets the first weights, ``order`` the batches."""
    model = build_model(seed, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = WAYS[way](model, optimizer)
    return [step(*batch).item() for batch in batches(steps, order, device)]


def compare(
    ways: Sequence[str], *, seeds: int, steps: int, device: str
) -> tuple[dict[str, Curve], float]:
    """Returns each way's curve, and fp32's distance from itself with other initial weights."""
    run = {"steps": steps, "device": device}
    base = [losses("fp32", seed=seed, order=seed, **run) for seed in range(seeds)]
    curves = {}
    for way in ways:
        gc.collect()  # the last session's casts end with its model
        own = [losses(way, seed=seed, order=seed, **run) for seed in range(seeds)]
        curves[way] = Curve(mean(map(final, own)), mean(map(distance, own, base)))
    reseeded = [losses("fp32", seed=seed + seeds, order=seed, **run) for seed in range(seeds)]
    return curves, mean(map(distance, reseeded, base))


def final(curve: Sequence[float]) -> float:
    """Returns the mean of the last tenth."""
    return mean(curve[-max(1, len(curve) // 10) :])


def distance(curve: Sequence[float], base: Sequence[float]) -> float:
    """Returns the mean distance of two curves, step by step."""
    return mean(abs(a - b) for a, b in zip(curve, base, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curves, spread = compare(args.ways, seeds=args.seeds, steps=args.steps, device=device)
    print(f"{args.seeds} seeds, {args.steps} steps, {device}, torch {torch.__version__}\n")
    print("| training | final loss | mean distance from fp32 |")
    print("|---|---|---|")
    for way, curve in curves.items():
        print(f"| {way} | {curve.final:.4f} | {curve.apart:.4f} |")
    print(f"| fp32, other initial weights | | {spread:.4f} |")


if __name__ == "__main__":
    main()
