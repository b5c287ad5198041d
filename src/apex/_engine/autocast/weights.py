"""16-bit casts of weights that several operators share.

Note [Shared casts]
    torch's autocast casts a leaf weight once until its outermost block ends, whatever is written to
    the weight meanwhile. amp shares casts for as long as torch's block around a loop would, and
    compares the weight with what was cast.

    torch's kernels share in its cache, in forward passes of prepared models. The cache stays from
    one pass to the next while an output awaits its backward pass and all weights are as before.
    A backward pass, a step, a pass without gradients and the end of a session clear it.

    Our own kernels compare the weight in each call, anywhere. They share the casts that a graph has
    saved or, in a forward pass, that torch's cache would hold.

    Nothing is shared while operators are recorded: the record needs casts of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import tree
from apex._core.op_casts import to_dtype
from apex._torch.autograd import is_recorded
from apex._torch.copies import current_stream

_PLAIN = {Tensor, nn.Parameter}


class SharedCasts:
    """The casts of weights that are alive in this process."""

    def __init__(self) -> None:
        # By weight, its version and address, dtype and stream. A cast keeps its weight alive.
        self._saved = weakref.WeakValueDictionary[tuple[object, ...], Tensor]()
        # Those of them that torch's cache would hold.
        self._held: list[Tensor] = []
        # What torch's cache holds casts for: dtype, stream, and weights by model.
        self._place: object = None
        self._weights = weakref.WeakKeyDictionary[nn.Module, object]()
        # The hooks of outputs that await their backward passes. Each lives as long as its graph.
        self._awaiting = weakref.WeakSet[Callable[..., None]]()
        # The parameters of each module of a model; a walk would take 5 us a module.
        self._tables = weakref.WeakKeyDictionary[nn.Module, list[dict[str, Any]]]()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype; a weight as it was cast before, if it still is."""
        is_weight = tensor.requires_grad and tensor.is_leaf and type(tensor) in _PLAIN
        if not is_weight or not torch.is_grad_enabled() or is_recorded(tensor.device):
            return to_dtype(tensor, dtype)
        stream = current_stream(tensor.device)
        key = id(tensor), tensor._version, tensor.data_ptr(), dtype, stream
        shared = self._saved.get(key)
        if shared is None:
            shared = to_dtype(tensor, dtype)
            self._saved[key] = shared
            if torch.is_autocast_cache_enabled():
                self._held.append(shared)
        else:
            shared._fix_weakref()  # the graph may own it
        return shared

    def begin_forward(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Begins a forward pass: clears torch's cache unless its casts are those of this pass."""
        if not torch.is_grad_enabled() or is_recorded(device):
            self.clear()
            return
        place = dtype, current_stream(device)
        if not self._awaiting or self._place != place or not self._are_unchanged():
            self.clear()
            self._place = place
        if model not in self._weights:
            self._weights[model] = self._stamp(model)

    def end_forward(self) -> None:
        """Ends a forward pass."""
        if not self._awaiting:
            self.clear()

    def await_backward(self, output: Any) -> None:
        """Keeps torch's cache until a backward pass reaches ``output``, or its graph is gone."""
        if not self._weights:
            return

        def end(*gradients: object) -> None:
            self.clear()

        for tensor in tree.tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(end)
                self._awaiting.add(end)

    def clear(self) -> None:
        """Drops all casts that no graph has saved."""
        self._awaiting.clear()
        self._weights.clear()
        self._held.clear()
        torch.clear_autocast_cache()

    def _are_unchanged(self) -> bool:
        for model, stamp in [*self._weights.items()]:
            if stamp is None or self._stamp(model) != stamp:
                return False
        return True

    def _stamp(self, model: nn.Module) -> object:
        """Returns what differs once a weight of ``model`` is exchanged or written.

        Returns None if it cannot be told.
        """
        tables = self._tables.get(model)
        if tables is None:
            tables = [module._parameters for module in model.modules() if module._parameters]
            self._tables[model] = tables
        weights: list[Any] = []
        for table in tables:
            weights += table.values()
        weights = [weight for weight in weights if weight is not None]
        if not _PLAIN.issuperset(map(type, weights)) or any(map(Tensor.is_inference, weights)):
            return None
        versions = [weight._version for weight in weights]
        return [*map(id, weights)], versions, [*map(Tensor.data_ptr, weights)]


shared = SharedCasts()
"""The casts of this process: torch's cache is the process's, too."""
