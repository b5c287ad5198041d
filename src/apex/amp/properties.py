"""The options of the levels in apex's terms: defaults and checked overrides."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from apex._core.arguments import flag
from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.policy import LossScale, Policy
from apex._core.scale import checked_static

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32

_NAMES = (
    *("enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
    *("patch_torch_functions_type", "keep_batchnorm_fp32", "master_weights", "loss_scale"),
    "cast_model_outputs",
)
_LEVELS: Mapping[str, tuple[Any, ...]] = {
    "O0": (_FP32, False, None, None, False, 1.0, None),
    "O1": (None, True, _FP16, None, None, "dynamic", None),
    "O2": (_FP16, False, None, True, True, "dynamic", None),
    "O3": (_FP16, False, None, False, False, 1.0, None),
    "O4": (None, True, _BF16, None, None, 1.0, None),
    "O5": (_BF16, False, None, True, True, 1.0, None),
}
"""Defaults by level, in the order of ``_NAMES`` from the third on."""

DESCRIPTIONS: Mapping[str, str] = {
    "O0": "the whole training in fp32.",
    "O1": "fp16 casts around operators, fp32 parameters.",
    "O2": "fp16 model, fp32 batch norm and fp32 master weights.",
    "O3": "the whole training in fp16.",
    "O4": "bf16 casts around operators, fp32 parameters.",
    "O5": "bf16 model, fp32 batch norm and fp32 master weights.",
}
"""Descriptions for the start-up report, by level."""


class Properties:
    """The options of an ``initialize`` call, readable and settable as attributes.

    Without an argument, those of apex before a level has set them.

    Attributes:
        options: Values by name.
    """

    options: dict[str, Any]

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        unset = {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
        given = {name: unset.get(name) for name in _NAMES} if options is None else options
        self.__dict__["options"] = dict(given)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up attributes before ``options`` exists.
        options = self.__dict__.get("options", {})
        if name not in options:
            raise AttributeError(
                f"amp has no option {name!r}; the options are {', '.join(options)}."
            )
        return options[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the option ``name``; after ``initialize``, only ``enabled`` has an effect."""
        self.options[name] = value


def level_defaults(opt_level: object, **overrides: Any) -> Properties:
    """Returns the defaults of a level, with ``overrides`` that are known to fit.

    Raises:
        RuntimeError: If there is no such level; the message lists the levels and suggests one.
    """
    if isinstance(opt_level, str) and opt_level in _LEVELS:
        row = dict(zip(_NAMES, (True, opt_level, *_LEVELS[opt_level]), strict=True))
        return Properties({**row, **overrides})
    text = str(opt_level).strip().upper()
    text = f"O{int(text)}" if text.isdigit() else text
    meant = f" Did you mean {text!r}?" if text in _LEVELS else ""
    raise RuntimeError(
        f"Unexpected optimization level {opt_level!r}.{meant} The levels are "
        f"{', '.join(map(repr, _LEVELS))}. "
        'Note that the prefix O in "O0", "O1" and so on is the letter O, not the number zero.'
    )


def resolve(
    defaults: Properties, overrides: Mapping[str, Any], *, hard_override: bool = False
) -> Properties:
    """Returns the level's defaults with the caller's overrides; ``None`` keeps a default.

    Under apex's hard override, an override that has no meaning causes a warning only.

    Raises:
        RuntimeError: If an override has no meaning at this level.
        ValueError: If the loss scale is not a number, not positive or not finite.
        TypeError: If a value has the wrong type.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    values = {name: _PARSERS[name](name, value) for name, value in given.items()}
    if defaults.patch_torch_functions and values.get("cast_model_type") is False:
        del values["cast_model_type"]
    for name, problem in _meaningless(defaults, values).items():
        if not hard_override:
            raise RuntimeError(problem)
        warnings.warn(problem, UserWarning, stacklevel=4)
        del values[name]
    return Properties({**defaults.options, **values})


def to_policy(properties: Properties) -> Policy:
    """Returns the policy that the options describe."""
    dtype, patched = properties.cast_model_type, bool(properties.patch_torch_functions)
    if not isinstance(dtype, torch.dtype) or (patched and dtype is not _FP32):
        dtype = None
    output = properties.cast_model_outputs
    return Policy(
        opt_level=properties.opt_level,
        param_dtype=dtype,
        compute_dtype=properties.patch_torch_functions_type if patched else None,
        output_dtype=_FP32 if output is None and dtype is not None else output,
        batchnorm_fp32=bool(properties.keep_batchnorm_fp32),
        master_weights=properties.master_weights or False,
        loss_scale=properties.loss_scale,
    )


_NOT_WITH_CASTS = {
    "keep_batchnorm_fp32": "parameters stay fp32 and batch norm follows its input",
    "master_weights": "the model's own parameters are fp32",
    "cast_model_type": "operators cast and the model stays fp32",
}
"""Why an override has no meaning at O1 and O4."""


def _meaningless(defaults: Properties, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the overrides that have no meaning at the level, each with the error message."""
    if defaults.patch_torch_functions:
        reasons, remedy = _NOT_WITH_CASTS, repr({"O1": "O2", "O4": "O5"}[defaults.opt_level])
    else:
        why = f"the whole model runs in {defaults.cast_model_type}"
        reasons = dict.fromkeys(("patch_torch_functions", "patch_torch_functions_type"), why)
        remedy = "'O1' (fp16) or 'O4' (bf16), which cast around operators"
    accepted = {"cast_model_type": _FP32, "patch_torch_functions": False}
    return {
        name: f"{name}={values[name]} has no meaning at {defaults.opt_level}, where {why}. "
        f"Leave it None, or use opt_level {remedy}."
        for name, why in reasons.items()
        if name in values and values[name] != accepted.get(name)
    }


def _as_master_weights(name: str, value: object) -> bool:
    if value in ("split", "stochastic"):
        raise ValueError(
            f"master_weights is {value!r}, which was taken out; it must be a bool. For less memory "
            "use O5 with an optimizer that keeps 8-bit moments, or a bf16 model without amp and "
            "torchao's optimizers with bf16_stochastic_round=True (docs/howto/memory.md)."
        )
    return flag(name, value)


def _dtype_parser(accepted: Collection[object], described: str) -> Callable[[str, object], object]:
    def parse(name: str, value: object) -> object:
        if (value is False or isinstance(value, torch.dtype)) and value in accepted:
            return value
        raise TypeError(f"{name} is {value!r}; it must be {described}.")

    return parse


_as_output_dtype = _dtype_parser(CASTABLE, "a floating-point torch.dtype or None")
as_low_precision = _dtype_parser(LOW_PRECISION, "torch.float16 or torch.bfloat16")


def as_loss_scale(name: str, value: object) -> LossScale:
    """Returns ``"dynamic"`` or a positive finite number; parses numeric strings."""
    return "dynamic" if value == "dynamic" else checked_static(value, name)


_PARSERS: Mapping[str, Any] = {
    "cast_model_type": _dtype_parser(
        {*CASTABLE, False},
        "torch.float16, torch.bfloat16, torch.float32 or torch.float64, or False for no conversion",
    ),
    "patch_torch_functions": flag,
    "patch_torch_functions_type": as_low_precision,
    "keep_batchnorm_fp32": flag,
    "master_weights": _as_master_weights,
    "loss_scale": as_loss_scale,
    "cast_model_outputs": _as_output_dtype,
}


class Level:
    """One level: a callable that sets the level's defaults in :class:`Properties`."""

    def __call__(self, properties: Properties) -> Properties:
        """Sets every option to the level's default; returns ``properties``."""
        properties.options.update(level_defaults(type(self).__name__).options)
        return properties


O0, O1, O2, O3, O4, O5 = (
    type(name, (Level,), dict.fromkeys(("brief", "more"), f"{name}:  {text}"))
    for name, text in DESCRIPTIONS.items()
)
opt_levels: Mapping[str, Level] = {kind.__name__: kind() for kind in (O3, O2, O1, O0, O4, O5)}
"""Levels by name."""
