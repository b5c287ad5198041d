"""Reduces all gradients at the end of each backward pass: ``delay_allreduce=True``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from apex._core import tree
from apex.parallel.gradient_reduction import Reduce, reduce_gradients


class DelayedReduction:
    """Collects the parameters' gradients and reduces them when the backward pass ends.

    Unlike torch's bucketed reducer, it supports any graph: parameters may be unused, used twice, or
    used inside a checkpointed segment.
    """

    def __init__(self, params: Sequence[nn.Parameter], reduce: Reduce) -> None:
        """Registers a hook on every trainable parameter for the lifetime of this object."""
        self.params = [param for param in params if param.requires_grad]
        self.reduce = reduce
        self._received: set[int] = set()
        self._unsent: set[int] = set()
        self._on = False
        self._queued = False
        for index, param in enumerate(self.params):
            hook = functools.partial(_received, weakref.ref(self), index)
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def enable(self, output: Any, *, on: bool) -> None:
        """Sets whether backward passes from ``output``, in any nesting, end with a reduction."""
        self._on = on
        # A backward pass that raised may have left these set.
        self._queued = False
        self._received.clear()
        if on and not torch.compiler.is_compiling():  # there, the parameters' hooks suffice
            tree.map_tensors(self._register_output, output)

    def receive(self, index: int) -> None:
        """Records that a parameter received a gradient."""
        if self._on:
            self._received.add(index)
            self._queue()
        else:
            self._unsent.add(index)

    def _register_output(self, tensor: Tensor) -> Tensor:
        # An output's hook runs in the outermost backward pass. A parameter's may run in a nested
        # one, started by a checkpointed segment, which would end too early.
        if tensor.requires_grad:
            tensor.register_hook(self._queue)  # type: ignore[no-untyped-call]
        return tensor

    def _queue(self, grad: Tensor | None = None) -> None:
        """Makes the engine reduce when its pass ends; also the hook of an output."""
        if self._on and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        unsent = {index for index in self._unsent if self.params[index].grad is not None}
        received = self._received | unsent
        self._queued = False
        self._received.clear()
        self._unsent.clear()
        reduce_gradients(self.params, self.reduce, received)


def _received(reference: weakref.ref[DelayedReduction], index: int, param: Tensor) -> None:
    """A parameter's hook, which does not keep its owner alive."""
    owner = reference()
    if owner is not None:
        owner.receive(index)
