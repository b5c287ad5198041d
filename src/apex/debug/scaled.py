"""Follows scaled gradients from the backward pass until a loss scaler unscales them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from apex._torch.autograd import backward_id
from apex.debug import tracing
from apex.debug.place import line_within_backward, runs_in_scaler
from apex.debug.rules import DIFFERENCES, LEAST_NUMBER
from apex.debug.tracing import ByMemory, Call, floating

_CLAMPS = ("clamp", "minimum", "maximum")
_COMPARISONS = tracing.operators("lt le gt ge")


class ScaledGradients:
    """The gradients that still carry a loss scale, and the values computed from them.

    Note [Scaled gradients]
        A loss that a ``GradScaler`` or amp multiplies starts a scaled pass. The gradients that
        arrive in it are scaled. The scaler unscales them, or the script multiplies them by the
        inverse of the scale.

        Until then, linear operations are right: a mean over ranks, an accumulation, a check for
        inf. Wrong are a threshold (a clip), a number that the script reads (a norm to log) or
        compares, and an optimizer's step. Gradients of gradients may enter a loss, for example in
        a gradient penalty. Then it is wrong to add values that carry no scale.

    Attributes:
        loss_scale: The scale of the last backward pass, 1 without one, and whether it adapts.
    """

    def __init__(self, unseen: tuple[float, bool]) -> None:
        """Takes the scale of losses that were computed before the trace."""
        self._unseen = unseen
        self.loss_scale = unseen
        # The scales of losses, and of the values computed from them, as in ``loss_scale``.
        self._losses = ByMemory[tuple[float, bool]]()
        # The multipliers that gradients, and the values computed from them, carry.
        self._scales = ByMemory[float]()

    def scale_of(self, values: Any) -> float:
        """Returns the scale that the first scaled tensor carries; 1 if none does."""
        scale = self._scales.of(values)
        return 1.0 if scale is None else scale

    def arrive(self, gradient: Tensor) -> None:
        """Records a gradient that arrives in the running backward pass."""
        scale = self.loss_scale[0]
        if scale != 1.0:
            self._scales.note(gradient, scale)

    def misuse(self, call: Call, result: Any) -> str:
        """Follows a call; returns what is wrong with it.

        ``"hook"`` is a change while a backward pass runs, ``"twice"`` a loss that is scaled twice.
        Other results are ``"change"``, ``"reading"``, ``"penalty"``, and ``""`` if all is right.
        """
        if backward_id() != -1:
            return self._follow_backward(call, result)
        is_scaled_twice = self._follow_loss(call, result)
        if is_scaled_twice:
            return "twice"
        scale = self.scale_of(call.arguments)
        if scale == 1.0:
            return ""
        changed = self._scaled(call.written)
        overwrites = changed and not call.traits.reads_written  # such as zero_
        if overwrites or self._unscaled_passes(call, scale) or runs_in_scaler():
            self._scales.discard(call.written)
            return ""
        compares = call.base in _COMPARISONS and self._meets_unscaled(call)
        if compares or call.base == "local_scalar_dense":
            return "reading"
        self._scales.note(tracing.outputs(call, result), scale)
        if not self._mixes(call, changed):
            return ""
        is_penalty = call.base in DIFFERENCES and not changed
        return "penalty" if is_penalty else "change"

    def _scaled(self, values: Any) -> list[Tensor]:
        """Returns the tensors that carry a scale."""
        return [tensor for tensor in floating(values) if self.scale_of([tensor]) != 1.0]

    def _follow_backward(self, call: Call, result: Any) -> str:
        """Records the results of a scaled pass; returns ``"hook"`` where user code clips one.

        The pass begins with a 1, which the derivative of the scaling multiplies by the scale.
        """
        scale = self.loss_scale[0]
        if scale == 1.0:
            return ""
        is_scaled = self.scale_of(call.arguments) != 1.0
        # A multiple of the scale is a factor of a formula, such as the mean's.
        unscales = self._unscaled_passes(call, scale) == 1
        is_result_scaled = is_scaled != unscales
        if is_result_scaled:
            self._scales.note(tracing.outputs(call, result), scale)
        if is_scaled and call.base.startswith(_CLAMPS) and line_within_backward():
            return "hook"
        return ""

    def _follow_loss(self, call: Call, result: Any) -> bool:
        """Records the scale of a loss that a scaler multiplies, and of numbers computed from it.

        Returns whether a scaled loss is scaled again.
        """
        if not isinstance(result, Tensor) or result.numel() != 1:
            return False
        scale = self._losses.of(call.arguments)
        is_scaled_twice = False
        if call.name == "aten.ones_like":  # autograd starts a backward pass this way
            self.loss_scale = scale or self._unseen
        elif call.name == "aten.mul" and runs_in_scaler():
            factor = call.args[1]
            is_scaled_twice = scale is not None
            # sync: tracing is a diagnosis, here and below
            scale = float(factor), isinstance(factor, Tensor)
        if scale is not None:
            self._losses.note(result, scale)
        return is_scaled_twice

    def _unscaled_passes(self, call: Call, scale: float) -> int:
        """Returns of how many passes a call takes the unscaled mean; 0 if it does not unscale.

        It multiplies or divides by the scale or its inverse, or by that times the number of passes.
        """
        if call.base not in ("mul", "div"):
            return int("unscale" in call.name)
        for value in tree_leaves(call.arguments):
            is_number = isinstance(value, int | float)
            if isinstance(value, Tensor):
                is_number = value.numel() == 1
            if not is_number:
                continue
            factor = float(value)
            if factor == 0.0:
                continue
            for count in (factor / scale, 1.0 / (factor * scale)):
                if 0.5 < count < math.inf and math.isclose(count, round(count), rel_tol=1e-3):
                    return round(count)
        return 0

    def _mixes(self, call: Call, changed: list[Tensor]) -> bool:
        """Returns whether a call combines scaled gradients with values for unscaled ones.

        ``changed`` are the scaled gradients that it writes.
        """
        if call.base.startswith("clamp"):
            # One number may be a factor from a norm, which is wrong only where it multiplies.
            return max(tensor.numel() for tensor in floating(call.arguments)) > 1
        # The scaled arguments that the call reads without writing them.
        known = set(map(id, changed))
        scaled = self._scaled(call.arguments)
        operands = [tensor for tensor in scaled if id(tensor) not in known]
        if call.base in ("mul", "div"):  # by a factor from their norm
            if changed:
                return bool(operands)
            # A factor has one element, the gradient several.
            sizes = {tensor.numel() for tensor in operands}
            return len(sizes) > 1 and 1 in sizes
        if call.base in DIFFERENCES:
            if changed:  # such as weight decay
                return not operands
            enters_loss = any(tensor.requires_grad for tensor in operands)
            return enters_loss and self._meets_unscaled(call)
        return False

    def _meets_unscaled(self, call: Call) -> bool:
        """Returns whether one of two operands carries no scale, and is no 0, epsilon or inf."""
        for operand in call.args[:2]:
            is_number = isinstance(operand, int | float)
            if is_number and not LEAST_NUMBER < abs(operand) < math.inf:
                continue
            if self.scale_of([operand]) == 1.0:
                return True
        return False
