"""Averages of loss and accuracy, accumulated on the device and over processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Score:
    """Averages over images.

    Attributes:
        loss: Mean loss.
        top1: Percentage of images whose label has the highest score.
        top5: Percentage of images whose label is among the five highest scores.
    """

    loss: float
    top1: float
    top5: float

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  top-1 {self.top1:5.2f}%  top-5 {self.top5:5.2f}%"


class Tally:
    """Accumulates scores on the device; only ``read`` syncs."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch: its mean ``loss``, ``logits`` [N, classes], ``labels`` [N]."""
        best = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
        count = len(labels)
        top1, top5 = best[:, 0].sum(), best.sum()
        self.sums += torch.stack([loss * count, top1, top5, torch.full_like(loss, count)])

    def read(self) -> Score:
        """Returns the averages over all batches of all processes; every process must call it."""
        sums = self.sums.clone()
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(sums)
        loss, top1, top5, count = sums.tolist()
        count = max(count, 1)
        return Score(loss / count, 100 * top1 / count, 100 * top5 / count)
