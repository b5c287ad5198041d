"""The state of a training run, its checkpoints and its output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from apex import amp


@dataclass
class Run:
    """A training run: the state that a checkpoint saves, and the device and rank."""

    model: nn.Module  # without DistributedDataParallel
    optimizer: Optimizer
    device: torch.device
    rank: int
    world_size: int
    epoch: int = 0
    best: float = 0.0


def say(run: Run, text: str) -> None:
    """Prints on rank 0 only."""
    if run.rank == 0:
        print(text, flush=True)


def save_checkpoint(folder: Path, run: Run, *, is_best: bool) -> None:
    """Writes ``checkpoint.pth.tar``, and ``model_best.pth.tar`` if it is the best."""
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
        unfinished.replace(
            folder / f"{name}.pth.tar"
        )  # the final name never holds an incomplete file


def load_checkpoint(path: Path, run: Run) -> None:
    """Resumes from a checkpoint; amp must have prepared the run already."""
    state = torch.load(path, map_location=run.device, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    run.epoch, run.best = state["epoch"], state["best"]
    say(run, f"resumed {path} at epoch {run.epoch}")
