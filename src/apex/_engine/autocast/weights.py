"""16-bit casts of weights that several operators share.

Note [Shared casts]
    torch's autocast casts a leaf weight once until its outermost block ends, whatever is written to
    the weight meanwhile. amp shares casts as a block around a training step would, and compares the
    weight with what was cast: identity, version, address and, on a CPU, its first elements.

    torch's kernels share in its cache, in forward passes of prepared models. The cache stays from
    one pass to the next while an output awaits its backward pass and all weights are as before.
    Our own kernels compare in each call, anywhere. They share a cast while a graph has saved it,
    and in a session also while torch's cache would.

    A backward pass, a step and the end of a session drop all casts. So does each forward pass once
    a CUDA graph has captured one, as replays write weights unseen. A forward pass without gradients
    drops its own, and does without torch's cache while that is kept for an output. Nothing is
    shared where torch records or transforms operators, as the record needs casts of its own.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._core.op_casts import to_dtype
from apex._engine.registry import live_specs
from apex._torch.autograd import backward_id, is_recorded
from apex._torch.copies import capturing, current_stream
from apex._torch.dynamo import untraced
from apex._torch.modules import modules_in

_PLAIN = {Tensor, nn.Parameter}

_SAMPLE = 256
"""Bytes of a weight on a CPU that are compared; reading a GPU's would wait for it."""

_NONE: Any = weakref.ref(set())
"""A reference to nothing."""


class SharedCasts:
    """The shared casts of this process."""

    def __init__(self) -> None:
        # Of our kernels, by weight and its state, dtype and stream. A cast keeps its weight alive.
        self._saved = weakref.WeakValueDictionary[tuple[object, ...], Tensor]()
        # Models whose casts torch's cache may hold, with the state of their weights.
        self._cached: dict[Weights, object] = {}
        # Casts of our kernels that live as long as torch's: a graph saves only some of them.
        self._kept: list[Tensor] = []
        # The hook of outputs that await their backward passes, which lives as long as a graph.
        self._hook: weakref.ref[Callable[..., None]] = _NONE
        # Whether a CUDA graph has captured a forward: its replays write weights unseen.
        self._has_captured = False

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in a castable dtype; an unchanged weight as it was cast before."""
        is_weight = tensor.requires_grad and tensor.is_leaf
        if not is_weight or not torch.is_grad_enabled() or is_recorded(tensor.device):
            return to_dtype(tensor, dtype)
        state = Weights({"": tensor}).state()
        if state is None:
            return to_dtype(tensor, dtype)
        key = state, dtype, current_stream(tensor.device)
        cast = self._saved.get(key)
        if cast is not None and cast._version == 0:  # a view of it may be written
            cast._fix_weakref()  # type: ignore[attr-defined]  # a graph may own it
            return cast
        cast = to_dtype(tensor, dtype)
        cast.grad_fn.register_prehook(self.drop)  # type: ignore[union-attr]
        self._saved[key] = cast
        if torch.is_autocast_cache_enabled() and live_specs():  # whose end drops it
            self._kept.append(cast)
        return cast

    def begin_forward(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, is_inside: bool
    ) -> bool:
        """Begins a forward pass; returns whether it shares the casts of torch's cache.

        Args:
            weights: Those of its model.
            device: A device of the model.
            dtype: The dtype of its casts.
            is_inside: Whether it is inside another forward pass with casts to this dtype.
        """
        self._has_captured |= capturing(device)
        if self._has_captured and not is_inside:
            self.drop()
        is_awaited = self._hook() is not None  # an output awaits its backward pass
        if not torch.is_grad_enabled() or backward_id() != -1 or is_recorded(device):
            if is_awaited:
                torch.set_autocast_cache_enabled(False)  # until the forward ends
            elif not is_inside:
                self._clear_cache()
            return False
        place = dtype, current_stream(device)
        is_valid = is_inside or is_awaited
        if is_valid:
            weights.find()
        for cached, state in [*self._cached.items()]:
            if is_valid:
                now = cached.state()
                is_valid = now is not None and state == (now, place)
        if not is_valid:
            self._clear_cache()
        if weights not in self._cached:
            self._cached[weights] = weights.state(), place
        return True

    def end_forward(self, weights: Weights) -> None:
        """Ends a forward pass of a model with these weights, which was inside no other one."""
        # A pass fills a cache that does not know it if another thread has cleared it meanwhile, or
        # if it is a pass without gradients around one with gradients.
        is_unknown = weights not in self._cached
        is_filled = is_unknown and torch.is_autocast_cache_enabled()
        if is_filled or self._hook() is None:
            self._clear_cache()

    def await_backward(self, output: Any) -> None:
        """Keeps torch's cache until a backward pass reaches ``output``, or its graph is gone."""
        hook = self._hook()
        if hook is None:
            hook = self.drop
            self._hook = weakref.ref(hook)
        tree.before_backward(output, hook)

    @untraced  # as a hook, it is a frame that dynamo of torch 2.10 would compile
    def drop(self, gradients: object = None) -> None:
        """Ends all sharing with the casts of now; also as a hook of autograd's nodes."""
        if self._saved:
            self._saved = weakref.WeakValueDictionary()  # clear() would take 1 us a cast
        self._clear_cache()

    def _clear_cache(self) -> None:
        self._hook = _NONE
        self._cached.clear()
        self._kept.clear()
        torch.clear_autocast_cache()


class Weights:
    """Some weights, and what changes when one of them is exchanged or written."""

    def __init__(
        self, *tables: Mapping[str, Tensor | None], model: nn.Module | None = None
    ) -> None:
        """Takes the parameters of modules by name, or a model, whose own are found when needed."""
        # The parameters of each module by name.
        self._tables = tables
        # The model, if it was given.
        self._model = _NONE if model is None else weakref.ref(model)
        # Addresses, and the memory of the first elements there; one value, for several threads.
        self._memory: tuple[list[int], list[Any]] = [], []

    def find(self) -> None:
        """Finds the weights of the model's parts, of which a script may add some."""
        model = self._model()
        if model is not None:
            self._tables = tuple(module._parameters for module in modules_in(model))

    def state(self) -> tuple[object, ...] | None:
        """Returns a state that equals a later one if no write is seen in between.

        Not seen: writes past torch's version counter that leave the first elements as they are, or
        are not on a CPU. Returns None with subclasses of tensors, and tensors without a state.
        """
        if not self._tables:
            self.find()
        values: list[Tensor | None] = []
        for table in self._tables:
            if table:  # most modules have no weights, at 0.1 us each
                values += table.values()
        weights = [weight for weight in values if weight is not None]
        if not _PLAIN.issuperset(map(type, weights)):
            return None
        try:
            addresses = [*map(Tensor.data_ptr, weights)]
            versions = [weight._version for weight in weights]
        except RuntimeError:  # of sparse and inference tensors
            return None
        before, samples = self._memory
        if addresses != before:
            samples = [*map(_sample, weights, addresses)]
            self._memory = addresses, samples
        return *map(id, weights), *versions, *addresses, b"".join(samples)  # read in 20 ns each


def _sample(weight: Tensor, address: int) -> Any:
    """Returns the memory of a weight's first elements, which does not keep the weight alive."""
    size = 0
    storage = weight.untyped_storage()
    # An address of 0 means that the memory is freed, which an offset would hide.
    if weight.is_cpu and address != 0 and storage.data_ptr() != 0:
        size = storage.data_ptr() + storage.nbytes() - address
    return (ctypes.c_char * min(size, _SAMPLE)).from_address(address)


shared = SharedCasts()
"""The casts of this process, whose threads share torch's cache."""
