"""The options of the levels in apex's terms: defaults and checked overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from apex._core.arguments import flag
from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.policy import LossScale, Policy
from apex._core.scale import checked_static
from apex._core.user_files import warn_at_caller


class Properties:
    """The options of an ``initialize`` call, readable and settable as attributes.

    Without an argument, the options have apex's values from before a level sets them.

    Attributes:
        options: Values by name.
    """

    options: dict[str, Any]

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        unset = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "patch_torch_functions_type": None,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
            "cast_model_outputs": None,
        }
        self.__dict__["options"] = unset if options is None else options

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


_MODEL_OPTIONS = ("cast_model_type", "keep_batchnorm_fp32", "master_weights")
"""Overrides that have no meaning at O1 and O4."""


class Level:
    """One level: a callable that sets the level's defaults in :class:`Properties`.

    Attributes:
        description: What the start-up report says of the level.
        refused: Overrides that have no meaning.
        instead: The levels that they have a meaning at.
    """

    description = ""
    refused: tuple[str, ...] = ("patch_torch_functions", "patch_torch_functions_type")
    instead = "'O1' (fp16) or 'O4' (bf16), which cast around operators"
    patch_torch_functions = False
    loss_scale: LossScale = 1.0

    def __call__(self, properties: Properties) -> Properties:
        """Sets every option to the level's default; returns ``properties``."""
        for name in properties.options:
            properties.options[name] = getattr(self, name, None)
        properties.enabled = True
        properties.opt_level = type(self).__name__
        return properties

    @property
    def brief(self) -> str:
        """The level's name and description."""
        return f"{type(self).__name__}:  {self.description}"

    more = brief


class O0(Level):
    """All of fp32: a baseline."""

    description = "the whole training in fp32."
    cast_model_type = torch.float32
    master_weights = False


class O1(Level):
    """The recommended fp16 default."""

    description = "fp16 casts around operators, fp32 parameters."
    refused = _MODEL_OPTIONS
    instead = "'O2'"
    patch_torch_functions = True
    patch_torch_functions_type = torch.float16
    loss_scale = "dynamic"


class O2(Level):
    """Fp16 weights with fp32 masters."""

    description = "fp16 model, fp32 batch norm and fp32 master weights."
    cast_model_type = torch.float16
    keep_batchnorm_fp32 = True
    master_weights = True
    loss_scale = "dynamic"


class O3(Level):
    """All of fp16: an upper bound on fp16 speed."""

    description = "the whole training in fp16."
    cast_model_type = torch.float16
    keep_batchnorm_fp32 = False
    master_weights = False


class O4(Level):
    """The recommended bf16 default."""

    description = "bf16 casts around operators, fp32 parameters."
    refused = _MODEL_OPTIONS
    instead = "'O5'"
    patch_torch_functions = True
    patch_torch_functions_type = torch.bfloat16


class O5(Level):
    """Bf16 weights with fp32 masters."""

    description = "bf16 model, fp32 batch norm and fp32 master weights."
    cast_model_type = torch.bfloat16
    keep_batchnorm_fp32 = True
    master_weights = True


opt_levels: Mapping[str, Level] = {
    "O3": O3(),
    "O2": O2(),
    "O1": O1(),
    "O0": O0(),
    "O4": O4(),
    "O5": O5(),
}
"""Levels by name, in apex's order."""


def level_defaults(opt_level: object) -> Properties:
    """Returns the defaults of a level.

    Raises:
        RuntimeError: If there is no such level; the message lists the levels.
    """
    if isinstance(opt_level, str) and opt_level in opt_levels:
        return opt_levels[opt_level](Properties())
    raise RuntimeError(
        f"Unexpected optimization level {opt_level!r}. The levels are "
        f"{', '.join(map(repr, sorted(opt_levels)))}. "
        'Note that the prefix O in "O0", "O1" and so on is the letter O, not the number zero.'
    )


_HARMLESS = {"cast_model_type": (torch.float32, False), "patch_torch_functions": (False,)}
"""Values of these overrides that change nothing, and are accepted at every level."""


def resolve(
    defaults: Properties, overrides: Mapping[str, Any], *, hard_override: bool
) -> Properties:
    """Returns the level's defaults with the caller's overrides; ``None`` keeps a default.

    Under apex's hard override, one that has no meaning applies as well, with a warning.

    Raises:
        RuntimeError: If an override has no meaning at this level.
        ValueError: If the loss scale is not a number, not positive or not finite.
        TypeError: If a value has the wrong type.
    """
    values = {
        name: _PARSERS[name](name, value) for name, value in overrides.items() if value is not None
    }
    level = opt_levels[defaults.opt_level]
    for name in level.refused:
        if name in values and values[name] not in _HARMLESS.get(name, ()):
            problem = (
                f"{name}={values[name]} has no meaning at {defaults.opt_level}: "
                f"{level.description} Leave it None, or use opt_level {level.instead}."
            )
            if not hard_override:
                raise RuntimeError(problem)
            warn_at_caller(problem)
    return Properties({**defaults.options, **values})


def to_policy(properties: Properties) -> Policy:
    """Returns the policy that the options describe."""
    casts_operators = properties.patch_torch_functions
    param_dtype = properties.cast_model_type or None
    output_dtype = properties.cast_model_outputs  # None is fp32 where inputs are cast, as in apex
    if output_dtype is None and param_dtype is not None:
        output_dtype = torch.float32
    return Policy(
        opt_level=properties.opt_level,
        param_dtype=param_dtype,
        compute_dtype=properties.patch_torch_functions_type if casts_operators else None,
        output_dtype=output_dtype,
        batchnorm_fp32=bool(properties.keep_batchnorm_fp32),
        master_weights=bool(properties.master_weights),
        loss_scale=properties.loss_scale,
    )


def _dtype_parser(accepted: Sequence[object], described: str) -> Callable[[str, object], object]:
    def parse(name: str, value: object) -> object:
        if value in accepted:
            return value
        raise TypeError(f"{name} is {value!r}; it must be {described}.")

    return parse


as_low_precision = _dtype_parser(LOW_PRECISION, "torch.float16 or torch.bfloat16")


def as_loss_scale(name: str, value: object) -> LossScale:
    """Returns ``"dynamic"`` or a positive finite number; parses numeric strings."""
    return "dynamic" if value == "dynamic" else checked_static(value, name)


_PARSERS: Mapping[str, Any] = {
    "cast_model_type": _dtype_parser(
        [*CASTABLE, False],
        "torch.float16, torch.bfloat16, torch.float32 or torch.float64, or False for no conversion",
    ),
    "patch_torch_functions": flag,
    "patch_torch_functions_type": as_low_precision,
    "keep_batchnorm_fp32": flag,
    "master_weights": flag,
    "loss_scale": as_loss_scale,
    "cast_model_outputs": _dtype_parser([*CASTABLE], "a floating-point torch.dtype or None"),
}
