"""Bytes per parameter: allocated between two iterations, and at the peak of one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from apex.tools.compare.training import saved_for_backward
from benchmarks.allocation import growth
from benchmarks.loops import Task, device, fused_adamw, native, with_amp
from benchmarks.measurement import Goal, Measurement
from benchmarks.race import Work

NAME = "memory"
WIDTH, LAYERS = 256, 4
BYTES = {"O0": 12, "O1": 12, "O2": 14, "O3": 6, "O4": 12, "O5": 14}
"""Parameter, fp32 master at O2 and O5, and AdamW's two moments."""

PASSES = 4
"""Backward passes of an iteration that accumulates."""

WIDE, DEEP = 1024, 13
"""A model of 13.6 M parameters with few activations."""

PEAKS = {"O2": 20.1, "O5": 16.2}
"""The goals without clipping; clipping may add 0.1."""


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields the stored bytes at each level, counted in two ways, and the peak of an iteration.

    Python can reach the live tensors. The allocator also counts tensors that only C++ holds, such
    as autocast's weight cache.
    """
    task = Task(_model, _batch, fused_adamw)
    params = _count(_model())
    for level, expected in BYTES.items():
        goal = Goal("==", expected)
        live = live_bytes(task, level) / params
        yield Measurement(NAME, f"{level}, live tensors", live, "bytes/param", goal, digits=1)
        allocated = allocated_bytes(task, level) / params
        yield Measurement(NAME, f"{level}, allocator", allocated, "bytes/param", goal, digits=1)
    yield from _peaks()


def _count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _peaks() -> Iterator[Measurement]:
    """Yields the peaks of an iteration of a model large enough to step in one pass."""
    task = Task(_large_model, _large_batch, fused_adamw)
    params = _count(_large_model())
    native_peak = peak_bytes(native(task, torch.bfloat16), 12 * params) / params
    yield Measurement(NAME, "peak, torch.autocast", native_peak, "bytes/param")
    for level, bound in PEAKS.items():
        stored = BYTES[level] * params
        peak = peak_bytes(_quiet(task, level), stored) / params
        yield Measurement(NAME, f"peak, {level}", peak, "bytes/param", Goal("<=", bound))
        peak = peak_bytes(_quiet(task, level, max_norm=0.1), stored) / params
        goal = Goal("<=", bound + 0.1)
        yield Measurement(NAME, f"peak, {level}, clipped", peak, "bytes/param", goal)
    work = with_amp(task, "O5", passes=PASSES)
    peak = peak_bytes(work, BYTES["O5"] * params) / params
    yield Measurement(NAME, f"peak, O5, {PASSES} passes", peak, "bytes/param", Goal("<=", 20.4))


def peak_bytes(work: Work, stored: int) -> int:
    """Returns the most bytes allocated at once in the third iteration of ``work``.

    Args:
        work: One iteration, which leaves no gradients.
        stored: What is allocated between iterations.
    """
    for _ in range(2):
        work()
    grown = growth(work, torch.device(device()))
    if grown is None:
        raise RuntimeError("This torch was built without Kineto, which reports allocations.")
    return stored + grown


def live_bytes(task: Task, level: str) -> int:
    """Returns the bytes of the tensors that training at ``level`` keeps, found by ``gc``."""
    gc.collect()
    before = storages()
    work = _trained(task, level)
    gc.collect()
    after = storages()
    del work  # it keeps model and optimizer until here
    return sum(size for address, size in after.items() if address not in before)


def allocated_bytes(task: Task, level: str) -> int:
    """Returns the bytes that training at ``level`` allocates and keeps."""
    gc.collect()
    if device() == "cuda":
        before = torch.cuda.memory_allocated()
        work = _trained(task, level)
        gc.collect()
        stored = torch.cuda.memory_allocated() - before
        del work
        return stored
    with profile(profile_memory=True, use_kineto=False) as record:
        work = _trained(task, level)
        gc.collect()
    del work
    return sum(event.self_cpu_memory_usage for event in record.key_averages())


def kept_bytes(forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Returns what ``forward`` returns, and the bytes that it keeps for its backward pass.

    Parameters also count. Each storage counts once.
    """
    kept: dict[int, int] = {}
    with saved_for_backward(kept):
        result = forward()
    return result, sum(kept.values())


def storages() -> dict[int, int]:
    """Returns the bytes of each storage that a tensor uses, by address.

    Masters are parameters. Other subclasses of Tensor, which compilation leaves behind, have no
    storage of their own.
    """
    tensors = []
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Buffer) or issubclass(type(thing), nn.Parameter):
            tensors.append(thing)
            if thing.is_leaf and thing.grad is not None:
                tensors.append(thing.grad)
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if _has_storage(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _has_storage(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not torch._is_functional_tensor(tensor)


def _quiet(task: Task, level: str, *, max_norm: float | None = None) -> Work:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is emulated on this CPU")
        return with_amp(task, level, max_norm=max_norm)


def _trained(task: Task, level: str) -> Work:
    work = _quiet(task, level)
    for _ in range(2):
        work()
    return work


def _model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _large_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)])


def _large_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDE), torch.randint(0, WIDE, (4,))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, WIDTH), torch.randint(0, WIDTH, (2,))
