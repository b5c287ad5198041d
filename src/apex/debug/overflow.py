"""Traces every operator, forward and backward, and names the first that overflows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from apex.debug.arguments import check_scaler
from apex.debug.faults import Fault
from apex.debug.module_tracker import ModuleTracker
from apex.debug.overflow_mode import OverflowMode
from apex.debug.provenance import Provenance
from apex.debug.rendering.formatting import listed
from apex.debug.tracing import Trace


def trace_overflow(*models: nn.Module, scaler: Any = None) -> OverflowTrace:
    """Returns a context that finds the first operator that overflows, its cause and a remedy.

    Enter it around one or more whole iterations, forward and backward; it may include
    ``optimizer.step``. The trace covers every operator, whatever calls it; the models provide the
    names of modules. Deliberate infinities (masks) count as a fault only once they produce a NaN or
    reach a gradient.

    A check and a host sync follow each operator, so an iteration takes several times as long.
    Models under ``torch.compile`` run uncompiled inside the context, as compiled code is opaque.

    Args:
        models: One or more models, as passed to ``amp.initialize`` or since wrapped by
            ``torch.compile`` or DistributedDataParallel; or plain models.
        scaler: The ``torch.amp.GradScaler`` of a loop without ``amp.initialize``. With it, scaled
            gradients that overflow only by their scale are known as such: cause ``loss scale``. By
            default, an enabled one that exists.

    Returns:
        An :class:`OverflowTrace` context; its ``first`` is the fault, or None.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softplus())
        >>> with amp.debug.trace_overflow(model) as trace:
        ...     model(torch.ones(1, 2)).log().sum().backward()
        >>> trace.first is None
        True
        >>> with amp.debug.trace_overflow(model) as trace:
        ...     (model(torch.ones(1, 2)) * 0).log().sum().backward()
        >>> trace.first.op, trace.first.kind, trace.first.cause
        ('aten.log', 'inf', 'domain')
    """
    return OverflowTrace(*models, scaler=scaler)


class OverflowTrace(Trace):
    """The result of :func:`trace_overflow`."""

    _NAME = "trace_overflow"

    def __init__(self, *models: nn.Module, scaler: Any = None) -> None:
        check_scaler("trace_overflow", scaler)
        super().__init__(*models)
        self._provenance, self._scaler = Provenance(), scaler

    def _new_mode(self) -> OverflowMode:
        return OverflowMode(ModuleTracker(*self._models), self._provenance, self._scaler)

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models, the scaler and all values."""
        super().__exit__(*exc_info)
        self._scaler = None
        self._provenance.close()

    @property
    def first(self) -> Fault | None:
        """The first fault; None if all values were finite or all others were harmless."""
        return self._provenance.first()

    @property
    def gradients(self) -> list[str]:
        """Names of parameters that received a non-finite gradient, in order of arrival."""
        return self._provenance.gradients

    def to_json(self) -> str:
        """Returns ``{"first": {...} or null, "operators": n, "gradients": [names]}``."""
        first = self.first
        return json.dumps(
            {
                "first": None if first is None else first.as_dict(),
                "operators": self._provenance.time,
                "gradients": self.gradients,
            }
        )

    def __str__(self) -> str:
        first = self.first
        if not self._provenance.time:
            return (
                "Nothing traced: no operator ran inside. Write `with "
                "amp.debug.trace_overflow(model) as trace:` around a whole iteration."
            )
        if first is None:
            return f"No overflow: {self._provenance.time} operators traced, no fault."
        return "\n".join([f"First overflow: {first}", *hit_lines(self.gradients)])


def hit_lines(gradients: Sequence[str]) -> list[str]:
    """Returns the report's line on the parameters whose gradients were hit; none without any."""
    return [f"  hit    the gradients of {listed(gradients, 3)}"] if gradients else []
