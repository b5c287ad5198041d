"""What one training consists of, its checkpoints, and its voice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from apex import amp


@dataclass
class Run:
    """One training: what a checkpoint saves, and where it runs."""

    model: nn.Module  # without DistributedDataParallel
    optimizer: Optimizer
    device: torch.device
    rank: int
    world_size: int
    epoch: int = 0
    best: float = 0.0


def say(run: Run, text: str) -> None:
    """Prints in one process only."""
    if run.rank == 0:
        print(text, flush=True)


def save_checkpoint(folder: Path, run: Run, *, is_best: bool) -> None:
    """Writes ``checkpoint.pth.tar``, and ``model_best.pth.tar`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "epoch": run.epoch,
        "best": run.best,
        "model": run.model.state_dict(),  # fp32 at every level
        "optimizer": run.optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    for name in ["checkpoint", "model_best"] if is_best else ["checkpoint"]:
        unfinished = folder / f"{name}.pth.tar.part"
        torch.save(state, unfinished)
        unfinished.replace(folder / f"{name}.pth.tar")  # never half a file under the real name


def load_checkpoint(path: Path, run: Run) -> None:
    """Goes on where the checkpoint was saved; the run must be prepared by amp already."""
    state = torch.load(path, map_location=run.device, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    run.epoch, run.best = state["epoch"], state["best"]
    say(run, f"resumed {path} at epoch {run.epoch}")
