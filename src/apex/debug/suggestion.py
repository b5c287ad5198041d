"""The result of ``suggest_fp32``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from apex.debug.rendering import formatting
from apex.debug.rendering.files import json_types


@dataclass(frozen=True)
class Suggestion:
    """The modules to keep in fp32 at a level, and what that brings.

    The error of a model's gradients is the root mean square, over its parameters, of the distance
    of each gradient from fp32's, relative to it by norm. Gradients below a thousandth of the
    largest do not count: those that vanish by construction have no digits in fp32, either.

    Attributes:
        modules: Names for ``fp32_modules``; at O1 and O4, of the modules to run without casts.
        opt_level: The level.
        error_before: Error of the gradients at this level; NaN if one overflows.
        error_after: Error with ``modules`` in fp32.
        bytes: Additional memory of weights, masters, gradients and activations saved for backward.
        sensitivities: For each of ``modules``, the error if only this one is left out.
        notes: What no choice of modules repairs, and operators without a verdict.
    """

    modules: list[str]
    opt_level: str
    error_before: float
    error_after: float
    bytes: int
    sensitivities: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def setting(self) -> str:
        """The line of code that applies it; ``""`` without modules."""
        if not self.modules:
            return ""
        if self.opt_level in ("O1", "O4"):
            return "with amp.disable_casts():  # around the forward of each, on .float() inputs"
        return (
            f"amp.initialize(model, optimizer, opt_level={self.opt_level!r}, "
            f"fp32_modules={self.modules!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all data in plain containers; an error that overflowed is None."""
        return {**json_types(asdict(self)), "setting": self.setting}

    def to_json(self) -> str:
        """Returns all data as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def verdict(self) -> str:
        """The modules, the errors and the price, in one sentence."""
        if not math.isfinite(self.error_after):
            return (
                f"Could not tell which modules need fp32 at {self.opt_level}: the gradients "
                "overflow, whatever loss scale and modules were tried. amp.debug.trace_overflow("
                "model) names the operator; a bf16 level has the range of fp32."
            )
        before = formatting.percent(self.error_before)
        if not self.modules:
            return f"No module needs fp32 at {self.opt_level}: error of the gradients {before}."
        price = f"{'-' if self.bytes < 0 else ''}{formatting.size(abs(self.bytes))}"
        return (
            f"Keep in fp32 at {self.opt_level}: {', '.join(self.modules)}. Error of the gradients "
            f"{before} -> {formatting.percent(self.error_after)}, for {price}."
        )

    def __str__(self) -> str:
        lines = [
            f"  without {name}: {formatting.percent(error)}"
            for name, error in self.sensitivities.items()
        ]
        setting = [f"  {self.setting}"] if self.setting else []
        return "\n".join([self.verdict, *lines, *setting, *self.notes])
