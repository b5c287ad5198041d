"""Bytes per parameter that remain allocated between two iterations."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from apex._engine.masters import Master
from benchmarks.loops import Task, device, fused_adamw, with_amp
from benchmarks.measurement import Goal, Measurement
from benchmarks.race import Work

NAME = "memory"
WIDTH, LAYERS = 256, 4
BYTES = {"O0": 12, "O1": 12, "O2": 14, "O3": 6, "O4": 12, "O5": 14}
"""Parameter, fp32 master at O2 and O5, and AdamW's two moments."""


def run(*, quick: bool) -> Iterator[Measurement]:
    """Yields the stored bytes at each level, counted in two ways.

    Live tensors are those that Python can reach; the allocator also knows those that only C++
    holds, such as autocast's weight cache.
    """
    task = Task(_model, _batch, fused_adamw)
    params = sum(param.numel() for param in _model().parameters())
    for level, expected in BYTES.items():
        goal = Goal("==", expected)
        for way, count in (("live tensors", live_bytes), ("allocator", allocated_bytes)):
            stored = count(task, level) / params
            yield Measurement(NAME, f"{level}, {way}", stored, "bytes/param", goal, digits=1)


def live_bytes(task: Task, level: str) -> int:
    """Returns the bytes of the tensors that training at ``level`` leaves for the garbage walker."""
    gc.collect()
    before = storages()
    work = _trained(task, level)
    gc.collect()
    after = storages()
    del work  # it keeps model and optimizer until here
    return sum(size for address, size in after.items() if address not in before)


def allocated_bytes(task: Task, level: str) -> int:
    """Returns the bytes that the allocator has given out and not got back."""
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

    Parameters count, too; each storage counts once.
    """
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def storages() -> dict[int, int]:
    """Returns the size in bytes of each storage in use by a tensor, by its address.

    Other subclasses of Tensor (those that compiling leaves behind) have no storage of their own.
    """
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter, nn.Buffer, Master):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and _has_storage(tensor):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def _has_storage(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not torch._is_functional_tensor(tensor)


def _trained(task: Task, level: str) -> Work:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fp16 is emulated")
        work = with_amp(task, level)
    for _ in range(2):
        work()
    return work


def _model() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, WIDTH), torch.randint(0, WIDTH, (2,))
