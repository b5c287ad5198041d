"""What the options of ``amp.initialize`` mean in terms of ``torch.amp``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from apex.amp import initialize
from apex.tools.migrate.script import dotted
from apex.tools.migrate.to_torch.reasons import Findings

DTYPES: Mapping[str, str | None] = {"O0": None, "O1": "torch.float16", "O4": "torch.bfloat16"}
"""What the levels that leave model and optimizer in fp32 cast to."""

NO_EQUAL: Mapping[str, str] = {
    "O2": "fp32 masters of an fp16 model and fp32 batch norm have no equal in torch.amp",
    "O3": "an fp16 model without masters has no equal in torch.amp",
    "O5": "fp32 masters of a bf16 model and fp32 batch norm have no equal in torch.amp",
}

_NO_EQUAL_OPTIONS: Mapping[str, str] = {
    "cast_model_type": "torch.amp does not cast models",
    "patch_torch_functions": "it overrides the level",
    "patch_torch_functions_type": "it overrides the level",
    "keep_batchnorm_fp32": "torch.amp has no fp32 batch norm in a 16-bit model",
    "master_weights": "torch.amp has no masters",
    "cast_model_outputs": "torch.amp does not cast outputs",
    "min_loss_scale": "GradScaler has no least scale",
    "max_loss_scale": "GradScaler has no greatest scale",
    "fp32_modules": "torch.amp needs an autocast(enabled=False) in these modules",
    "num_losses": "GradScaler has one scale, not one for each loss",
}
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "num_losses": (1,),
    "max_loss_scale": (2.0**24,),
    "fp32_modules": ((), []),
}
"""Values beside None that change nothing."""

_OF_LEVEL = frozenset({"opt_level", "loss_scale", "keep_batchnorm_fp32", "master_weights"})
"""Options that scripts take from their command line, to leave them to the level by default."""

_OF_SCALER = ("growth_interval", "growth_factor", "backoff_factor")


@dataclass(frozen=True)
class Precision:
    """What replaces a level.

    Attributes:
        level: Its name.
        dtype: Source of the dtype that ``autocast`` gets; None for fp32.
        scales: Whether there is a ``GradScaler``.
        scaler_options: Its arguments, as source.
        enabled: Source of the condition that switches amp on; None if it is always on.
    """

    level: str
    dtype: str | None
    scales: bool
    scaler_options: Mapping[str, str] = field(default_factory=dict)
    enabled: str | None = None


def arguments_of(call: cst.Call) -> dict[str, cst.BaseExpression] | None:
    """Returns the arguments of a call of ``initialize`` by name; None where ``*`` hides them."""
    names = list(inspect.signature(initialize).parameters)
    found = {}
    for argument in call.args:
        if argument.star:
            return None
        name = argument.keyword.value if argument.keyword else names.pop(0)
        found[name] = argument.value
    return found


class OptionReader:
    """Reads the options of one call; what has no equal goes to the findings."""

    def __init__(
        self, findings: Findings, arguments: Mapping[str, cst.BaseExpression], level: str | None
    ) -> None:
        """Takes the arguments by name, and the level to assume where the call computes it."""
        self._findings = findings
        self._arguments = arguments
        self._assumed = level

    def precision(self) -> Precision | None:
        """Returns what replaces the level, or None if it has no equal."""
        level = self._level()
        for name, reason in _NO_EQUAL_OPTIONS.items():
            if self._value(name, None) not in (None, *_HARMLESS.get(name, ())):
                self._refuse(name, reason)
        if level not in DTYPES:
            return None
        dtype, enabled = DTYPES[level], self._enabled()
        scales = self._scales(level)
        options = {key: self._code(key) for key in _OF_SCALER if key in self._arguments}
        return Precision(level, dtype, scales, options if scales else {}, enabled)

    def _level(self) -> str:
        level = self._value("opt_level", "O1", own=self._assumed)
        if level in NO_EQUAL:
            self._refuse("opt_level", NO_EQUAL[level])
        elif level not in DTYPES and level is not None:
            self._refuse("opt_level", "there is no such level")
        return str(level)

    def _scales(self, level: str) -> bool:
        scale = self._value("loss_scale", None)
        if scale is None:
            return level == "O1"
        if scale == "dynamic" and level != "O0":
            return True
        if _number(scale) != 1.0:
            self._refuse("loss_scale", "GradScaler has no static scale: it checks and skips")
        return False

    def _enabled(self) -> str | None:
        given = self._arguments.get("enabled")
        if given is None or self._code("enabled") == "True":
            return None
        if dotted(given) is None or self._code("enabled") == "False":
            self._refuse("enabled", "only a plain name can be taken over")
        return self._code("enabled")

    def _value(self, name: str, default: Any, own: Any = None) -> Any:
        """Returns the value of a literal; ``own`` for one that is computed, if assumed."""
        if name not in self._arguments:
            return default
        try:
            return ast.literal_eval(self._code(name))
        except (ValueError, SyntaxError):
            return self._computed(name, own)

    def _computed(self, name: str, own: Any) -> Any:
        node, code = self._arguments[name], f"{name}={self._code(name)}"
        if name not in _OF_LEVEL:
            if code != "max_loss_scale=2.**24":  # apex's default, in the words of its own signature
                self._refuse(name, _NO_EQUAL_OPTIONS[name])
            return None
        if self._assumed is None:
            self._findings.refuse(
                node,
                f"{code} is known only when the script runs; name the level with --level, and "
                "it is taken to be that level's own.",
            )
            return None
        taken = f'"{own}"' if own else "the level's own"
        self._findings.note(node, f"{code} was taken to be {taken} and is read no more.")
        return own

    def _code(self, name: str) -> str:
        return self._findings.script.code(self._arguments[name])

    def _refuse(self, name: str, reason: str) -> None:
        node = self._arguments[name]
        self._findings.refuse(node, f"{name}={self._code(name)}: {reason}.")


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
