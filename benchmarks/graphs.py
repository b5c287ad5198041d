"""A whole training step in a CUDA graph, compared with the same steps run one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp

WARMUP, REPLAYS = 3, 4


def difference_of_replays(level: str) -> float:
    """Returns the largest difference of any master after some steps, captured and eager.

    One of the replayed batches overflows, so that the scale moves and a step is skipped.
    """
    batches = [_batch(step) for step in range(WARMUP + REPLAYS)]
    ours, reference = _pair(level), _pair(level)
    replay = captured(*ours, batches[:WARMUP])
    for batch in batches[WARMUP:]:
        replay(batch)
    for inputs, targets in batches:
        _step(*reference, inputs, targets)
    pairs = zip(*(amp.master_params(optimizer) for _, optimizer in (ours, reference)), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def captured(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> Callable[[tuple[Tensor, Tensor]], None]:
    """Trains on ``data``, captures one more step; returns what replays it on a batch."""
    inputs, targets = (tensor.clone() for tensor in data[0])

    def fill(batch: tuple[Tensor, Tensor]) -> None:
        inputs.copy_(batch[0])
        targets.copy_(batch[1])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in data:
            fill(batch)
            _step(model, optimizer, inputs, targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _step(model, optimizer, inputs, targets)

    def replay(batch: tuple[Tensor, Tensor]) -> None:
        fill(batch)
        graph.replay()

    return replay


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


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 16, generator=generator)
    if step == WARMUP + 1:
        inputs[0, 0] = torch.inf
    return inputs.cuda(), torch.randn(8, 4, generator=generator).cuda()


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    loss = F.mse_loss(model(inputs).float(), targets)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
