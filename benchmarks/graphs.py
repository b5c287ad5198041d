"""CUDA graphs of a whole iteration, of its passes alone, and of the model, compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp

Captured = Literal["iteration", "passes", "model"]
"""What the graphs hold: ``"model"`` is ``torch.cuda.make_graphed_callables``."""
CAPTURED: tuple[Captured, ...] = ("iteration", "passes", "model")

WARMUP, REPLAYS = 3, 5
Batch = tuple[Tensor, Tensor]


def difference_of_replays(
    level: str, captured: Captured, *, max_norm: float | None = None, overflow_at: int = WARMUP + 1
) -> float:
    """Returns the largest difference of a master or loss scale, captured and eager.

    One of the replayed batches overflows, so that the scale moves and a step is skipped.
    """
    batches = [_batch(step, overflow=step == overflow_at) for step in range(WARMUP + REPLAYS)]
    model, optimizer = _pair(level)
    if captured == "model":
        sample = batches[0][0].clone()
        graphed = torch.cuda.make_graphed_callables(model, (sample,))
        for inputs, targets in batches:
            _iterate(graphed, optimizer, inputs, targets, max_norm)
    else:
        _replay(model, optimizer, batches, captured, max_norm)
    eager_model, eager_optimizer = _pair(level)
    for inputs, targets in batches:
        _iterate(eager_model, eager_optimizer, inputs, targets, max_norm)
    differences = [abs(_loss_scale(optimizer) - _loss_scale(eager_optimizer))]
    masters = amp.master_params(optimizer)
    eager_masters = amp.master_params(eager_optimizer)
    for master, eager_master in zip(masters, eager_masters, strict=True):
        differences.append((master - eager_master).abs().max().item())
    return max(differences)


def _loss_scale(optimizer: torch.optim.Optimizer) -> float:
    loss = torch.ones((), device="cuda", requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return float(scaled_loss.detach())


def _replay(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    captured: Captured,
    max_norm: float | None,
) -> None:
    """Trains on the first batches, captures, and replays on the others."""
    inputs = batches[0][0].clone()
    targets = batches[0][1].clone()

    def fill(batch: Batch) -> None:
        inputs.copy_(batch[0])
        targets.copy_(batch[1])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in batches[:WARMUP]:
            fill(batch)
            _iterate(model, optimizer, inputs, targets, max_norm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if captured == "iteration":
            _iterate(model, optimizer, inputs, targets, max_norm)
        else:
            _pass(model, optimizer, inputs, targets)
    for batch in batches[WARMUP:]:
        fill(batch)
        graph.replay()
        if captured == "passes":
            _step(optimizer, max_norm)


def _iterate(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    max_norm: float | None,
) -> None:
    _pass(model, optimizer, inputs, targets)
    _step(optimizer, max_norm)
    optimizer.zero_grad()


def _pass(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
) -> None:
    loss = F.mse_loss(model(inputs).float(), targets)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def _step(optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    if max_norm is not None:
        amp.clip_grad_norm_(optimizer, max_norm)
    optimizer.step()


def _pair(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, fused=True, capturable=True
    )
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    return model, optimizer


def _batch(step: int, *, overflow: bool) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 16, generator=generator)
    if overflow:
        inputs[0, 0] = torch.inf
    return inputs.cuda(), torch.randn(8, 4, generator=generator).cuda()
