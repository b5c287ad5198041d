"""All gradients reduced once, at the end of each backward pass: ``delay_allreduce=True``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from apex._core import tree
from apex.parallel.gradient_reduction import GradientReduction, reduce_gradients


class DelayedReduction:
    """Watches parameters for gradients and reduces them when the backward pass is over.

    Unlike torch's bucketed reducer it asks nothing of the graph: parameters may stay unused, be
    used twice, or be used inside a checkpointed segment.
    """

    def __init__(self, params: Sequence[nn.Parameter], reduction: GradientReduction) -> None:
        """Puts a hook on every parameter that wants a gradient; it ends with this object."""
        self.params = [param for param in params if param.requires_grad]
        self.reduction = reduction
        self._received: set[int] = set()
        self._on = False
        self._queued = False
        for index, param in enumerate(self.params):
            watch = _Watch(self, index)
            handle = param.register_post_accumulate_grad_hook(watch)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def arm(self, output: Any, *, on: bool) -> None:
        """Says whether the backward passes of ``output`` are to end with a reduction.

        Args:
            output: What the module returned, in any nesting.
            on: False while gradients accumulate without communication.
        """
        self._on = on
        # A backward pass that an exception ended has left these behind.
        self._queued = False
        self._received.clear()
        if on and not torch.compiler.is_compiling():  # hooks of the parameters do there
            tree.map_tensors(self._watch_output, output)

    def receive(self, index: int) -> None:
        """Takes note that a parameter got a gradient."""
        if self._on:
            self._received.add(index)
            self._queue()

    def _watch_output(self, tensor: Tensor) -> Tensor:
        # An output's hook runs in the outermost backward pass; a parameter's may run in one that a
        # checkpointed segment starts inside, and would end too early.
        if tensor.requires_grad:
            tensor.register_hook(self._output_reached)  # type: ignore[no-untyped-call]
        return tensor

    def _output_reached(self, grad: Tensor) -> None:
        if self._on:
            self._queue()

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        received = set(self._received)
        self._queued = False
        self._received.clear()
        reduce_gradients(self.params, received, self.reduction)


class _Watch:
    """A hook of one parameter that does not keep its owner alive."""

    def __init__(self, owner: DelayedReduction, index: int) -> None:
        self._owner = weakref.ref(owner)
        self._index = index

    def __call__(self, param: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.receive(self._index)
