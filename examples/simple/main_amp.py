"""Fits a noisy sine with a small net: the smallest program that uses amp.

python examples/simple/main_amp.py --opt-level O5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp  # amp, line 1 of 3


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Trains, and returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", metavar="O0..O5")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-3, 3, 256, device=device).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)

    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model = model.append(nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = amp.initialize(  # amp, line 2 of 3
        model, optimizer, opt_level=args.opt_level
    )

    losses = []
    for step in range(args.steps):
        loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp, line 3 of 3
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}")
    return losses[0].item(), losses[-1].item()


if __name__ == "__main__":
    main()
