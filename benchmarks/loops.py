"""Training loops to compare: native torch, native autocast, and amp at each level."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from benchmarks.race import Work

Batch = tuple[Tensor, Tensor]


class MakeOptimizer(Protocol):
    """Makes an optimizer over a model's parameters."""

    def __call__(self, params: list[nn.Parameter], /) -> torch.optim.Optimizer: ...


@dataclass(frozen=True)
class Task:
    """What to train; functions of modules, so that it pickles.

    Attributes:
        model: Makes the model, in fp32 on the CPU.
        batch: Makes inputs and class labels.
        optimizer: Makes the optimizer.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: MakeOptimizer


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer that most benchmarks use."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def device() -> str:
    """Returns where the benchmarks run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def plain(task: Task) -> Work:
    """Returns one iteration without mixed precision, which returns the loss."""
    model, optimizer, (inputs, labels) = _start(task)

    def iteration() -> Tensor:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return iteration


def native(task: Task, dtype: torch.dtype) -> Work:
    """Returns one iteration under ``torch.autocast``, with a ``GradScaler`` if in fp16."""
    return _with_scaler(task) if dtype is torch.float16 else _with_autocast(task, dtype)


def with_amp(
    task: Task,
    level: str,
    *,
    max_norm: float | None = None,
    passes: int = 1,
    scaled: bool = True,
) -> Work:
    """Returns one iteration with amp at ``level``, which may clip the gradients' norm.

    Several passes accumulate the gradients of the same batch. Unless they are ``scaled``, they
    begin with a plain ``loss.backward()``.
    """
    model, optimizer, (inputs, labels) = _start(task)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        verbosity=0,
    )

    def iteration() -> Tensor:
        for _ in range(passes):
            loss = F.cross_entropy(model(inputs), labels)
            loss = loss if passes == 1 else loss / passes  # native loops do not divide
            with amp.scale_loss(loss, optimizer) if scaled else nullcontext(loss) as scaled_loss:
                scaled_loss.backward()
        if max_norm is not None:
            amp.clip_grad_norm_(optimizer, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return iteration


def _with_autocast(task: Task, dtype: torch.dtype) -> Work:
    model, optimizer, (inputs, labels) = _start(task)
    kind = device()

    def iteration() -> Tensor:
        with torch.autocast(kind, dtype):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return iteration


def _with_scaler(task: Task) -> Work:
    model, optimizer, (inputs, labels) = _start(task)
    kind = device()
    scaler = torch.amp.GradScaler(kind)

    def iteration() -> Tensor:
        with torch.autocast(kind, torch.float16):
            loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return iteration


def _start(task: Task) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    torch.manual_seed(0)
    model = task.model().to(device())
    inputs, labels = task.batch()
    optimizer = task.optimizer(list(model.parameters()))
    return model, optimizer, (inputs.to(device()), labels.to(device()))
