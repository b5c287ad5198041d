"""Preserves random number generators, buffers, inputs and weight cache around a run of a model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._engine.autocast.region import casts_off as casts_off
from apex._torch.devices import accelerator


@contextmanager
def preserve_state(model: nn.Module, arguments: object) -> Iterator[None]:
    """Restores, at the end of the block, the state that running a model changes.

    This covers the random number generators (torch's on the CPU and on the model's devices,
    Python's and numpy's), the model's buffers and the tensors among the arguments. Autocast's
    weight cache is cleared, because a weight cast inside belongs to a graph that no longer exists.

    Costs a copy of the buffers and of the arguments' tensors.
    """
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        stack.enter_context(_random_numbers(model))
        inputs = [(tensor, tensor.detach().clone()) for tensor in tree.tensors(arguments)]
        stack.callback(_restore_values, inputs)
        for module in model.modules():
            stack.callback(_restore_buffers, module, dict(module._buffers))
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        stack.callback(_restore_values, buffers)
        stack.enter_context(eager())
        yield


def _restore_values(saved: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in saved:
        # Through .data: the user's graph may have saved the tensor, and would check its version.
        tensor.data.copy_(before)


def _restore_buffers(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    buffers = module._buffers
    if list(buffers.keys()) != list(before):  # a scripted module's cannot be cleared, nor differ
        buffers.clear()
    for name, buffer in before.items():
        buffers[name] = buffer


@contextmanager
def _random_numbers(model: nn.Module) -> Iterator[None]:
    found = accelerator()
    kind = "cuda" if found is None else found.type
    tensors = (*model.parameters(), *model.buffers())
    indices = sorted({t.device.index or 0 for t in tensors if t.device.type == kind})
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    # MPS has one generator and no device indices, so fork_rng cannot save it.
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


def eager() -> AbstractContextManager[Any]:
    """Returns a context that runs compiled parts eagerly, if dynamo, slow to import, is loaded."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()
