"""Reduces all gradients at the end of each backward pass: ``delay_allreduce=True``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.autograd import Variable

from apex._core import tree
from apex._torch.autograd import adds_to_any
from apex._torch.dynamo import is_compiling
from apex.parallel.gradient_reduction import GradientReduction, reduce_gradients


class DelayedReduction:
    """Reduces the parameters' gradients when the backward pass ends.

    Unlike torch's bucketed reducer, it supports any graph: parameters may be unused, used twice, or
    used inside a checkpointed segment. As in apex, it reduces every existing gradient.
    """

    def __init__(self, params: Sequence[nn.Parameter], reduction: GradientReduction) -> None:
        """Registers a hook on every parameter for the lifetime of this object."""
        self.params = params
        self.reduction = reduction
        # Whether the present backward pass ends with a reduction.
        self._on = False
        # Whether one has, since a forward pass turned it on.
        self._has_run = True
        # Whether the autograd engine already has the callback of this pass.
        self._queued = False
        # A proxy, because a parameter's hook must not keep this object alive.
        hook = functools.partial(DelayedReduction.queue, weakref.proxy(self))
        for param in params:
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def enable(self, output: Any, *, on: bool) -> None:
        """Sets whether backward passes from ``output``, in any nesting, end with a reduction."""
        if on or self._has_run:  # else the next pass reduces, as in torch
            self._on = on
            self._has_run = False
        self._queued = False  # a backward pass that raised may have left it set
        # An output's hook runs in the outermost backward pass. A parameter's hook may run in the
        # nested pass of a checkpointed segment, which ends before other gradients are complete.
        if on and not is_compiling():  # compiled code has no nested passes
            tree.before_backward(output, self.queue)

    def queue(self, _: object) -> None:
        """Queues the reduction for the end of the pass; the hook of parameters and outputs."""
        if self._on and not self._queued and adds_to_any(self.params):
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._queued = False
        self._has_run = True
        reduce_gradients(self.params, self.reduction)
