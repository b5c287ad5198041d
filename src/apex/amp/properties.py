"""The option table of the levels in apex's terms: defaults and checked overrides."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from apex._core.arguments import flag
from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.policy import LossScale, Policy
from apex._core.scale import checked_static


@dataclass(frozen=True)
class Properties:
    """One row of the option table.

    Attributes:
        enabled: Whether amp is enabled.
        opt_level: ``"O0"`` to ``"O5"``.
        cast_model_type: Dtype of parameters and inputs; ``None`` or ``False`` for no conversion.
        patch_torch_functions: Whether ops cast their inputs by the op table.
        patch_torch_functions_type: Low-precision dtype of these casts.
        keep_batchnorm_fp32: Whether batch norm stays fp32 in a converted model.
        master_weights: Whether optimizers step fp32 masters.
        loss_scale: A number, or ``"dynamic"``.
        cast_model_outputs: Dtype of the model's outputs; ``None`` for the level's default.
    """

    enabled: bool
    opt_level: str
    cast_model_type: torch.dtype | bool | None
    patch_torch_functions: bool
    patch_torch_functions_type: torch.dtype | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScale
    cast_model_outputs: torch.dtype | None = None


_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32

LEVELS: Mapping[str, Properties] = {
    row.opt_level: row
    for row in (
        Properties(True, "O0", _FP32, False, None, None, False, 1.0),
        Properties(True, "O1", None, True, _FP16, None, None, "dynamic"),
        Properties(True, "O2", _FP16, False, None, True, True, "dynamic"),
        Properties(True, "O3", _FP16, False, None, False, False, 1.0),
        Properties(True, "O4", None, True, _BF16, None, None, 1.0),
        Properties(True, "O5", _BF16, False, None, True, True, 1.0),
    )
}
"""Defaults by level."""

DESCRIPTIONS: Mapping[str, str] = {
    "O0": "the whole training in fp32.",
    "O1": "fp16 casts around operators, fp32 parameters.",
    "O2": "fp16 model, fp32 batch norm and fp32 master weights.",
    "O3": "the whole training in fp16.",
    "O4": "bf16 casts around operators, fp32 parameters.",
    "O5": "bf16 model, fp32 batch norm and fp32 master weights.",
}
"""Descriptions for the start-up report, by level."""


def level_defaults(opt_level: object) -> Properties:
    """Returns the defaults of a level.

    Raises:
        RuntimeError: If there is no such level; the message lists the levels and suggests one.
    """
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return LEVELS[opt_level]
    text = str(opt_level).strip().upper()
    text = f"O{int(text)}" if text.isdigit() else text
    meant = f" Did you mean {text!r}?" if text in LEVELS else ""
    raise RuntimeError(
        f"Unexpected optimization level {opt_level!r}.{meant} The levels are "
        f"{', '.join(map(repr, LEVELS))}. "
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
    for name, problem in _meaningless(defaults, values):
        if not hard_override:
            raise RuntimeError(problem)
        warnings.warn(problem, UserWarning, stacklevel=3)
        del values[name]
    return replace(defaults, **values)


def to_policy(properties: Properties) -> Policy:
    """Returns the policy that the options describe."""
    dtype = properties.cast_model_type
    param_dtype = dtype if isinstance(dtype, torch.dtype) else None
    if properties.patch_torch_functions and param_dtype is not _FP32:
        param_dtype = None
    output = properties.cast_model_outputs
    if output is None and param_dtype is not None:
        output = torch.float32
    patched = properties.patch_torch_functions
    return Policy(
        opt_level=properties.opt_level,
        param_dtype=param_dtype,
        compute_dtype=properties.patch_torch_functions_type if patched else None,
        output_dtype=output,
        batchnorm_fp32=bool(properties.keep_batchnorm_fp32),
        master_weights=properties.master_weights or False,
        loss_scale=properties.loss_scale,
    )


def _meaningless(defaults: Properties, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the overrides in ``values`` that have no meaning at the level, with the error message.

    The caller may delete one from ``values`` before it asks for the next.
    """
    level, full = defaults.opt_level, "O2" if defaults.opt_level == "O1" else "O5"
    reasons, remedy = (
        {
            "patch_torch_functions": f"the whole model runs in {defaults.cast_model_type}",
            "patch_torch_functions_type": f"the whole model runs in {defaults.cast_model_type}",
        },
        "'O1' (fp16) or 'O4' (bf16), which cast around operators",
    )
    if defaults.patch_torch_functions:
        reasons, remedy = (
            {
                "keep_batchnorm_fp32": "parameters stay fp32 and batch norm follows its input",
                "master_weights": "the model's own parameters are fp32",
                "cast_model_type": "operators cast and the model stays fp32",
            },
            repr(full),
        )
    accepted = {"cast_model_type": _FP32, "patch_torch_functions": False}
    for name, why in reasons.items():
        if name in values and values[name] != accepted.get(name):
            yield (
                name,
                f"{name}={values[name]} has no meaning at {level}, where {why}. Leave it None, or "
                f"use opt_level {remedy}.",
            )


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


def as_loss_scale(name: str, value: object) -> LossScale:
    """Returns ``"dynamic"`` or a positive finite number; parses numeric strings."""
    return "dynamic" if value == "dynamic" else checked_static(value, name)


_PARSERS: Mapping[str, Any] = {
    "cast_model_type": _dtype_parser(
        {*CASTABLE, False},
        "torch.float16, torch.bfloat16, torch.float32 or torch.float64, or False for no conversion",
    ),
    "patch_torch_functions": flag,
    "patch_torch_functions_type": _dtype_parser(LOW_PRECISION, "torch.float16 or torch.bfloat16"),
    "keep_batchnorm_fp32": flag,
    "master_weights": _as_master_weights,
    "loss_scale": as_loss_scale,
    "cast_model_outputs": _as_output_dtype,
}
