"""Collectives of an iteration under DistributedDataParallel, and the bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from apex import amp
from benchmarks.counting import OperatorCounter
from benchmarks.loops import device, fused_adamw
from benchmarks.measurement import Goal, Measurement

NAME = "collectives"
LEVELS = ("O1", "O2", "O4", "O5")
TENSORS = (10, 100, 1000)
WIDTH = 8
LATER = 4
"""An iteration after the first."""


Counts = tuple[float, float]
"""Collectives, and the bytes that they send."""


class CollectiveCounter(OperatorCounter):
    """Counts collectives and what they send.

    Attributes:
        calls: Number of collectives.
        bytes: Bytes of the tensors that they take.
    """

    def __init__(self) -> None:
        """Starts at zero."""
        super().__init__()
        self.calls = 0
        self.bytes = 0

    def count(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Counts an operator of ``torch.distributed``."""
        if func.namespace == "c10d":
            self.calls += 1
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)


class Vectors(nn.Module):
    """A model of many small parameters."""

    def __init__(self, tensors: int) -> None:
        """Makes the parameters."""
        super().__init__()
        self.parts = nn.ParameterList([torch.rand(WIDTH) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input, weighted by the mean of the parameters."""
        return x * torch.stack([*self.parts]).mean(dim=0)


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields counts of the first and of a later iteration, without amp and at each level."""
    for tensors in TENSORS[:2] if quick else TENSORS:
        alone = counted(None, tensors)
        yield from _rows(f"without amp, {tensors} tensors", alone, WIDTH * tensors, None)
        (first_calls, first_sent), (calls, sent) = alone
        # In 16 bits; the first iteration also sends the masters, in fp32.
        with_masters = (first_calls + 1, first_sent / 2 + 4 * WIDTH * tensors), (calls, sent / 2)
        for level in LEVELS:
            most = with_masters if level in ("O2", "O5") else alone
            counts = counted(level, tensors)
            yield from _rows(f"{level}, {tensors} tensors", counts, WIDTH * tensors, most)


def _rows(
    case: str, counts: Sequence[Counts], params: int, most: Sequence[Counts] | None
) -> Iterator[Measurement]:
    """Yields collectives, and bytes by parameter, of each iteration; ``most`` are the goals."""
    for index, name in enumerate(("first", "later")):
        for unit, factor, part in (("collectives", 1, 0), ("bytes/param", params, 1)):
            value = counts[index][part] / factor
            goal = None if most is None else Goal("<=", most[index][part] / factor)
            yield Measurement(NAME, f"{case}, {name} iteration", value, unit, goal, digits=1)


def counted(level: str | None, tensors: int) -> tuple[Counts, Counts]:
    """Returns collectives and bytes of the first and of a later iteration ."""
    # One rank counts as many: nothing depends on their number.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model: nn.Module = Vectors(tensors).to(device())
        optimizer = fused_adamw(list(model.parameters()))
        if level is not None:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        parallel = DistributedDataParallel(model)
        counts = []
        for _ in range(LATER):
            with CollectiveCounter() as counter:
                loss = parallel(torch.ones(WIDTH, device=device())).float().mean()
                block = nullcontext(loss) if level is None else amp.scale_loss(loss, optimizer)
                with block as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.append((counter.calls, counter.bytes))
        return counts[0], counts[-1]
    finally:
        torch.distributed.destroy_process_group()
