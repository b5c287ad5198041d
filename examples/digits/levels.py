"""Trains and times the demo's net at each optimization level, and records what the report shows."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from train import Examples, accuracy, batches, build_model, train

from apex import amp

LOW_DTYPES = {
    "O0": torch.float32,
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
"""The dtype of each level's heavy arithmetic, as asked for; a Run holds the one seen."""

EMULATION_RATIO = 4.0
"""A dtype is emulated if its matrix product takes this many times that of float32."""


@dataclass(frozen=True)
class Run:
    """One level's training.

    Attributes:
        level: "O0" to "O5".
        compute_dtype: dtype that a convolution was seen to return.
        emulated: Whether this machine has no arithmetic of its own for that dtype.
        losses: One per step.
        loss_scales: The scale before the first step, then after each step.
        accuracy: Fraction of the test digits named right.
        bytes_per_param: Stored bytes per parameter between two steps.
    """

    level: str
    compute_dtype: torch.dtype
    emulated: bool
    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    accuracy: float
    bytes_per_param: float

    @property
    def skipped(self) -> tuple[int, ...]:
        """Steps, counted from 1, that overflowed: there the loss scale fell."""
        pairs = itertools.pairwise(self.loss_scales)
        return tuple(step for step, (old, new) in enumerate(pairs, start=1) if new < old)


def is_emulated(dtype: torch.dtype, device: str) -> bool:
    """Returns whether a matrix product in ``dtype`` is far slower here than in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, waiting for a second thread hides the difference
    try:
        low, full = _product_seconds(dtype, device), _product_seconds(torch.float32, device)
    finally:
        torch.set_num_threads(threads)
    return low > EMULATION_RATIO * full


def train_level(
    level: str,
    data: tuple[Examples, Examples],
    *,
    steps: int,
    seed: int,
    emulated: bool,
    on_step: Callable[[], object],
) -> Run:
    """Trains a fresh net at ``level``; the same arguments give the same losses."""
    train_data, test_data = data
    model, optimizer = _prepare(level, train_data[0].device, seed)
    losses, scales = [], [_loss_scale()]
    stream = batches(train_data, steps=steps, batch_size=64, seed=seed)
    for loss in train(model, optimizer, stream):
        losses.append(loss.item())
        scales.append(_loss_scale())
        on_step()
    return Run(
        level=level,
        compute_dtype=_compute_dtype(model, test_data[0][:1]),
        emulated=emulated,
        losses=tuple(losses),
        loss_scales=tuple(scales),
        accuracy=accuracy(model, test_data),
        bytes_per_param=_stored_bytes(model, optimizer)
        / sum(param.numel() for param in model.parameters()),
    )


def time_levels(
    rounds: Mapping[str, int], data: Examples, *, seed: int, on_step: Callable[[], object]
) -> dict[str, float]:
    """Returns each level's median milliseconds per training step.

    The levels take turns, one step each, so that a busy moment of the machine meets all alike.

    Args:
        rounds: How many steps to time, per level.
        data: The digits to take the one batch of 64 from.
        seed: Of the nets' first weights.
        on_step: Called after each timed step.
    """
    batch = (data[0][:64], data[1][:64])
    steppers = {level: _endless(level, batch, seed) for level in rounds}
    times: dict[str, list[float]] = {level: [] for level in rounds}
    for stepper in steppers.values():
        next(stepper)  # the first step allocates the optimizer's state
    for turn in range(max(rounds.values())):
        for level, stepper in steppers.items():
            if turn < rounds[level]:
                times[level].append(_seconds(lambda: next(stepper)) * 1e3)  # noqa: B023
                on_step()
    return {level: median(values) for level, values in times.items()}


def _prepare(
    level: str, device: torch.device, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    gc.collect()  # an earlier level's session must be gone: amp.state_dict shows all living ones
    torch.manual_seed(seed)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def _endless(level: str, batch: Examples, seed: int) -> Iterator[Tensor]:
    model, optimizer = _prepare(level, batch[0].device, seed)
    return train(model, optimizer, itertools.repeat(batch))


def _loss_scale() -> float:
    return float(amp.state_dict()["loss_scaler0"]["loss_scale"])


@torch.no_grad()
def _compute_dtype(model: nn.Module, image: Tensor) -> torch.dtype:
    """Returns the dtype of the first convolution's output."""
    seen: list[torch.dtype] = []
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    handle = convolution.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    try:
        model(image)
    finally:
        handle.remove()
    return seen[0]


def _stored_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of parameters, masters, optimizer state and what gradients remain."""
    params: Sequence[Tensor] = [*model.parameters(), *amp.master_params(optimizer)]
    state = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    grads = [param.grad for param in params if param.grad is not None]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*params, *state, *grads)
    }
    return sum(storages.values())


def _product_seconds(dtype: torch.dtype, device: str) -> float:
    matrix = torch.ones(256, 256, device=device).to(dtype)
    return min(_seconds(lambda: matrix @ matrix) for _ in range(10))


def _seconds(work: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
