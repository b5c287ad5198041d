"""Where backward passes end, if no weight gets a gradient."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._torch.dispatch_modes import suspend_modes
from apex.debug.common import listed, weight_of
from apex.debug.place import Place
from apex.debug.tracing import Call, Trace, dense, floating

_BEFORE = "What comes before it is data, detached, frozen, or an integer."


class GradientEnds(Trace):
    """A trace of the last operator that backward passes reach.

    Autograd differentiates operators in reverse order. So the last derivative of a pass belongs to
    the first operator of the loss's graph, and what comes before it (a detached tensor, a frozen
    module, integers) gets no gradient. A pass also ends at a derivative that is 0 everywhere.
    """

    def __init__(self, *models: Any) -> None:
        super().__init__(*models)
        # The last derivative: its operator, its dtype and place, and whether it returned zeros.
        self._op = ""
        self._dtype = ""
        self._place: Place | None = None
        self._ends_in_zeros = False
        # Names of the parameters that got a gradient other than 0; a set in order of time.
        self._reached: dict[str, None] = {}
        # Whether an optimizer has stepped, and whether one has found a gradient that is not 0.
        self._has_stepped = False
        self._has_gradients = False
        # By ``id``: the names of the parameters in steps, ``""`` after a gradient that is not 0.
        self._untrained: dict[int, str] = {}

    @property
    def cut_off(self) -> str:
        """Where backward passes end, if no step has found a gradient; else ``""``."""
        is_cut = self._has_stepped or (self._ends_in_zeros and not self._reached)
        if self._has_gradients or not is_cut:
            return ""
        place = self._place
        if place is None:
            text = "no operator ran backward, as if the loss were a constant or detached."
        elif self._ends_in_zeros:
            text = f"{self._op} {place.where} returned zeros in {self._dtype}.\n{place.shown}"
            if self._dtype == "float16":
                text += (
                    "\nNumbers below 3e-8 are 0 there, and so is 1 / inf: `apex trace --digits` "
                    "looks for the former, `apex trace` for the latter."
                )
        else:
            text = f"backward passes end {place.where}.\n{place.shown}\n{_BEFORE}"
        names = [*filter(None, self._reached)]
        if names:
            text += f"\nGradients reach {listed(names)}: not the optimizer's, or cleared before."
            return f"No step found a gradient: {text}"
        return f"No weight got a gradient: {text}"

    @property
    def untrained(self) -> list[str]:
        """Names of the parameters in steps that have had no gradient other than 0."""
        return [*filter(None, self._untrained.values())]

    def _after(self, call: Call, before: Any, result: Any) -> None:
        """Records the operator, if it is the last one so far of a backward pass."""
        gradients = list(floating(result))
        is_forward = self._tracker.direction == "forward"
        if is_forward or not gradients or self._has_gradients:
            return
        is_zero = not _has_values(gradients)
        target = self._tracker.accumulating
        if target is not None:
            if not is_zero:
                name = self._tracker.parameters.get(target, "")
                self._reached[name] = None
        elif not call.traits.view and not (is_zero and self._ends_in_zeros):
            self._op = call.name
            self._dtype = dtypes.name(gradients[0].dtype)
            self._place = self._tracker.place
            self._ends_in_zeros = is_zero

    def _leave_step(self, optimizer: Optimizer, *given: Any) -> None:
        """Looks for a gradient that is not 0, also among the step's arguments."""
        super()._leave_step(optimizer)
        self._has_stepped = True
        with suspend_modes():
            if _has_values(given):  # instead of the parameters' own
                self._has_gradients = True
                return
            for param in params_of(optimizer):
                name = self._tracker.parameters.get(weight_of(param), "")
                self._untrained.setdefault(id(param), name)
                if _has_values(param.grad):
                    self._has_gradients = True
                    self._untrained[id(param)] = ""


def _has_values(gradients: Any) -> bool:
    """Returns whether a gradient is not 0."""
    return any(dense(gradient).norm() for gradient in floating(gradients))  # sync: a diagnosis
