"""Trains a small conv net on handwritten digits, at any optimization level of amp.

python examples/digits/train.py --opt-level O4
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from apex import amp  # amp, line 1 of 3

Examples = tuple[Tensor, Tensor]  # images [N, 1, 8, 8] in 0..1, labels [N]


@cache
def load_data(device: str) -> tuple[Examples, Examples]:
    """Returns 1437 training and 360 test digits, always the same split."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1).to(device)
    labels = torch.tensor(digits.target).to(device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


def batches(data: Examples, *, steps: int, batch_size: int, seed: int) -> Iterator[Examples]:
    """Yields ``steps`` batches, reshuffled in every epoch."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    while steps > 0:
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        for chosen in order.split(batch_size)[:steps]:
            yield images[chosen], labels[chosen]
            steps -= 1


def build_model(width: int = 64) -> nn.Sequential:
    """Returns a conv net, of 0.4 million parameters at its default width."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)),
        *(nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False), nn.BatchNorm2d(4 * width)),
        *(nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * width * 2 * 2, 10)),
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Examples]
) -> Iterator[Tensor]:
    """Trains on each batch and yields its loss."""
    for images, labels in data:
        loss = F.cross_entropy(model(images).float(), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp, line 3 of 3
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, data: Examples) -> float:
    """Returns the accuracy of ``model`` on ``data``, between 0 and 1."""
    images, labels = data
    model.eval()
    right = model(images).argmax(dim=1) == labels
    model.train()
    return float(right.float().mean())


def count(text: str) -> int:
    """Parses an integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", metavar="O0..O5")
    parser.add_argument("--epochs", type=count, default=5)
    parser.add_argument("--steps", type=count, help="number of steps; overrides --epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loss-scale", help="a number or 'dynamic'; default: the level's")
    return parser.parse_args()


def main() -> None:
    """Trains, and prints the final loss and the test accuracy."""
    args = parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_data, test_data = load_data(device)
    steps = args.steps or args.epochs * math.ceil(len(train_data[1]) / args.batch_size)

    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    model, optimizer = amp.initialize(  # amp, line 2 of 3
        model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale
    )

    data = batches(train_data, steps=steps, batch_size=args.batch_size, seed=args.seed)
    for step, loss in enumerate(train(model, optimizer, data), start=1):
        if step % 20 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.4f}")
    print(f"final loss {loss.item():.4f}, test accuracy {accuracy(model, test_data):.2%}")


if __name__ == "__main__":
    main()
