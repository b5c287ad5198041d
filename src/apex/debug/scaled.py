"""Follows gradients from a scaled backward pass on, until a loss scaler unscales them."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from apex._torch.autograd import backward_id
from apex.debug import tracing
from apex.debug.place import runs_in_scaler
from apex.debug.tracing import ByMemory, Call, floating

Misuse = Literal["change", "reading"]

_CLAMPS = ("clamp", "minimum", "maximum")


class ScaledGradients:
    """The gradients that still carry a loss scale, and what was computed from them.

    Note [Scaled gradients]
        A loss that a ``GradScaler`` or amp multiplies starts a scaled pass, and the gradients that
        arrive in it are scaled. They are so until the scaler writes them, or the script itself
        multiplies them by the inverse of the scale. Until then, whatever is linear is right: a
        mean over ranks, an accumulation, a check for inf. Wrong are a threshold (a clip), a number
        that the script reads (a norm to log), and an optimizer's step.

    Attributes:
        loss_scale: The scale of the last backward pass, None without one, and whether it adapts.
    """

    def __init__(self, unseen: tuple[float | None, bool]) -> None:
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
        if scale is not None:
            self._scales.note(gradient, scale)

    def misuse(self, call: Call, result: Any) -> Misuse | None:
        """Follows a call outside of backward passes; returns what is wrong with it, if anything."""
        if backward_id() != -1:
            return None
        if isinstance(result, Tensor) and result.numel() == 1:
            self._follow_loss(call, result)
        scale = self.scale_of(call.arguments)
        if scale == 1.0:
            return None
        if "unscale" in call.name or self._unscales(call, scale) or runs_in_scaler():
            self._forget(call.written)
            return None
        if call.base == "local_scalar_dense":
            return "reading"
        changed = [tensor for tensor in call.written if self.scale_of([tensor]) != 1.0]
        if changed and not call.traits.reads_written:  # such as zero_
            self._forget(changed)
            return None
        if not changed:
            for tensor in floating(result):
                self._scales.note(tensor, scale)
        return "change" if self._mixes(call, changed) else None

    def _follow_loss(self, call: Call, result: Tensor) -> None:
        """Records the scale of a loss that a scaler multiplies, and of what is computed from it."""
        scale = None
        for tensor in floating(call.arguments):
            scale = scale or self._losses.of(tensor)
        if call.name == "aten.ones_like":  # autograd starts a backward pass this way
            self.loss_scale = scale or self._unseen
        elif call.name == "aten.mul" and runs_in_scaler():
            factor = call.args[1]
            scale = float(factor), isinstance(factor, Tensor)  # sync: tracing is a diagnosis
        if scale is not None and scale[0] != 1.0:
            self._losses.note(result, scale)

    def _forget(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._scales.discard(tensor)

    def _unscales(self, call: Call, scale: float) -> bool:
        """Returns whether a call multiplies by the inverse of the scale."""
        if call.base not in ("mul", "div"):
            return False
        for value in tracing.leaves(call.arguments):
            is_tensor = isinstance(value, Tensor)
            if isinstance(value, int | float) or (is_tensor and value.numel() == 1):
                number = float(value)  # sync: as above
                if math.isclose(number, scale, rel_tol=1e-3):
                    return True
                if math.isclose(number, 1.0 / scale, rel_tol=1e-3):
                    return True
        return False

    def _mixes(self, call: Call, changed: list[Tensor]) -> bool:
        """Returns whether a call changes scaled gradients by what is meant for unscaled ones."""
        if call.base.startswith(_CLAMPS):
            return bool(changed)
        known = set(map(id, changed))
        others = [tensor for tensor in floating(call.arguments) if id(tensor) not in known]
        scaled = [tensor for tensor in others if self.scale_of([tensor]) != 1.0]
        if call.base in ("mul", "div"):  # a factor that was computed from their norm
            sizes = {tensor.numel() for tensor in scaled}
            return bool(scaled) if changed else len(sizes) > 1 and 1 in sizes
        return call.base in ("add", "sub") and bool(changed) and not scaled
