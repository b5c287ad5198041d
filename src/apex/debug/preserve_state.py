"""Run a model and leave no trace: random numbers, buffers, inputs and weight cache as before."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apex._engine.autocast.region import no_casts
from apex._engine.autocast.thread_casts import DEVICE_TYPES


@contextmanager
def untouched(model: nn.Module, arguments: object) -> Iterator[None]:
    """Puts back, at the end of the block, what running a model changes.

    These are the state of the random number generators (torch's, on the model's devices too,
    Python's and numpy's), the model's buffers, the tensors among the arguments, and autocast's
    weight cache, which is emptied: a weight cast inside belongs to a graph that is gone.

    Costs a copy of the buffers and of the arguments' tensors.
    """
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        stack.enter_context(_random_numbers(model))
        given = [(tensor, tensor.detach().clone()) for tensor in tensors_in(arguments)]
        stack.callback(_put_back, given)
        for module in model.modules():
            stack.callback(_put_buffers_back, module, dict(module._buffers))
        kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        stack.callback(_put_back, kept)
        stack.enter_context(_eager())
        yield


@contextmanager
def casts_off() -> Iterator[None]:
    """Turns off the casts of amp's regions and of any ``torch.autocast``, as for a backward."""
    on = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
    with no_casts():
        for device in on:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in on:
                torch.set_autocast_enabled(device, True)


def tensors_in(value: object) -> list[Tensor]:
    """Returns the tensors in any nesting of sequences, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = list(vars(value).values())
    else:
        return []
    return [tensor for item in inner for tensor in tensors_in(item)]


def _put_back(kept: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in kept:
        # Through .data: a graph of the user's may have saved the tensor and checks its version.
        tensor.data.copy_(before)


def _put_buffers_back(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    module._buffers.clear()
    module._buffers.update(before)


@contextmanager
def _random_numbers(model: nn.Module) -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    tensors = (*model.parameters(), *model.buffers())
    indices = sorted({t.device.index or 0 for t in tensors if t.device.type == kind})
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    # MPS has one generator and no devices to name: fork_rng cannot save it.
    mps = torch.mps.get_rng_state() if kind == "mps" else None
    indices = [] if kind == "mps" else indices
    try:
        with torch.random.fork_rng(devices=indices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if mps is not None:
            torch.mps.set_rng_state(mps)
        if numpy is not None:
            numpy.random.set_state(state)


@contextmanager
def _eager() -> Iterator[None]:
    """Runs compiled parts eagerly, where anything can be compiled: importing dynamo is slow."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
