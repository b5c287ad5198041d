"""Follows gradients from a scaled backward pass on, until a loss scaler unscales them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from apex._torch.autograd import backward_id
from apex.debug import tracing
from apex.debug.place import line_within_backward, runs_in_scaler
from apex.debug.tracing import ByMemory, Call, floating

_CLAMPS = ("clamp", "minimum", "maximum")
_COMPARISONS = {"lt", "le", "gt", "ge"}
_ADDITIONS = {"add", "sub", "rsub"}

_LEAST_NUMBER = 1e-3
"""Smaller numbers are an epsilon."""


class ScaledGradients:
    """The gradients that still carry a loss scale, and what was computed from them.

    Note [Scaled gradients]
        A loss that a ``GradScaler`` or amp multiplies starts a scaled pass, and the gradients that
        arrive in it are scaled. They are so until the scaler writes them, or the script itself
        multiplies them by the inverse of the scale. Until then, whatever is linear is right: a
        mean over ranks, an accumulation, a check for inf. Wrong are a threshold (a clip), a number
        that the script reads (a norm to log) or compares, and an optimizer's step. Gradients of
        gradients may enter a loss, as those of a gradient penalty do: then it is wrong to add what
        carries no scale.

    Attributes:
        loss_scale: The scale of the last backward pass, 1 without one, and whether it adapts.
    """

    def __init__(self, unseen: tuple[float, bool]) -> None:
        """Takes the scale of losses that were computed before the trace, as in ``loss_scale``."""
        self.loss_scale = self._unseen = unseen
        self._losses: ByMemory[tuple[float, bool]] = ByMemory()
        self._scales: ByMemory[float] = ByMemory()

    def scale_of(self, values: Any) -> float:
        """Returns the scale that the first scaled tensor carries; 1 if none does."""
        for tensor in floating(values):
            scale = self._scales.of(tensor)
            if scale is not None:
                return scale
        return 1.0

    def arrive(self, gradient: Tensor) -> None:
        """Records a gradient that arrives in the running backward pass."""
        scale = self.loss_scale[0]
        if scale != 1.0:
            self._scales.note(gradient, scale)

    def misuse(self, call: Call, result: Any) -> str:
        """Follows a call; returns what is wrong with it.

        That is ``"change"``, ``"hook"`` (a change while a backward pass runs), ``"reading"``,
        ``"penalty"``, ``"twice"`` (a loss is scaled), or ``""`` if all is right.
        """
        if backward_id() != -1:
            return self._follow_backward(call, result)
        if isinstance(result, Tensor) and result.numel() == 1 and self._follow_loss(call, result):
            return "twice"
        scale = self.scale_of(call.arguments)
        if scale == 1.0:
            return ""
        changed = [tensor for tensor in call.written if self.scale_of([tensor]) != 1.0]
        overwrites = changed and not call.traits.reads_written  # such as zero_
        if overwrites or self._unscales(call, scale) or runs_in_scaler():
            for tensor in call.written:
                self._scales.discard(tensor)
            return ""
        compares = call.base in _COMPARISONS and self._meets_unscaled(call)
        if compares or call.base == "local_scalar_dense":
            return "reading"
        if not changed:
            for tensor in floating(result):
                self._scales.note(tensor, scale)
        if not self._mixes(call, changed):
            return ""
        return "penalty" if call.base in _ADDITIONS and not changed else "change"

    def _follow_backward(self, call: Call, result: Any) -> str:
        """Records what a scaled pass computes; returns ``"hook"`` where user code clips it.

        The pass begins with a 1, which the derivative of the scaling multiplies by the scale.
        """
        scale = self.loss_scale[0]
        if scale == 1.0 or call.traits.view:
            return ""
        is_scaled = self.scale_of(call.arguments) != 1.0
        if is_scaled != self._unscales(call, scale):
            for tensor in tracing.outputs(call, result):
                self._scales.note(tensor, scale)
        if is_scaled and call.base.startswith(_CLAMPS) and line_within_backward():
            return "hook"
        return ""

    def _follow_loss(self, call: Call, result: Tensor) -> bool:
        """Records the scale of a loss that a scaler multiplies, and of what is computed from it.

        Returns whether it had a scale before.
        """
        is_twice = False
        scale = None
        for tensor in floating(call.arguments):
            scale = scale or self._losses.of(tensor)
        if call.name == "aten.ones_like":  # autograd starts a backward pass this way
            self.loss_scale = scale or self._unseen
        elif call.name == "aten.mul" and runs_in_scaler():
            factor = call.args[1]
            is_twice = scale is not None
            scale = float(factor), isinstance(factor, Tensor)  # sync: tracing is a diagnosis
        if scale is not None and scale[0] != 1.0:
            self._losses.note(result, scale)
        return is_twice

    def _unscales(self, call: Call, scale: float) -> bool:
        """Returns whether a call unscales, or multiplies by the inverse of the scale."""
        if call.base not in ("mul", "div"):
            return "unscale" in call.name
        for value in tracing.leaves(call.arguments):
            is_tensor = isinstance(value, Tensor)
            if isinstance(value, int | float) or (is_tensor and value.numel() == 1):
                number = float(value)  # sync: as above
                for factor in (scale, 1.0 / scale):
                    if math.isclose(number, factor, rel_tol=1e-3):
                        return True
        return False

    def _mixes(self, call: Call, changed: list[Tensor]) -> bool:
        """Returns whether a call changes scaled gradients by what is meant for unscaled ones."""
        if call.base.startswith("clamp"):  # a norm's factor is wrong where it multiplies
            return max(tensor.numel() for tensor in floating(call.arguments)) > 1
        if call.base.startswith(_CLAMPS):
            return bool(changed)
        known = set(map(id, changed))
        others = [tensor for tensor in floating(call.arguments) if id(tensor) not in known]
        scaled = [tensor for tensor in others if self.scale_of([tensor]) != 1.0]
        if call.base in ("mul", "div"):  # a factor that was computed from their norm
            sizes = {tensor.numel() for tensor in scaled}
            return bool(scaled) if changed else len(sizes) > 1 and 1 in sizes
        if call.base not in _ADDITIONS:
            return False
        if changed:
            return not scaled
        in_loss = any(tensor.requires_grad for tensor in scaled)
        return in_loss and self._meets_unscaled(call)

    def _meets_unscaled(self, call: Call) -> bool:
        """Returns whether one of two operands carries no scale, and is no 0, epsilon or inf."""
        for value in call.args[:2]:
            is_number = isinstance(value, int | float)
            if is_number and not _LEAST_NUMBER < abs(value) < math.inf:
                continue
            if self.scale_of([value]) == 1.0:
                return True
        return False
