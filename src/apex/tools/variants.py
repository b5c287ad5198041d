"""The ways of training to compare: each level of amp, and torch.autocast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from apex._core import dtypes
from apex.debug.rendering.formatting import short
from apex.tools.errors import InputError


@dataclass(frozen=True)
class Variant:
    """One way of training.

    Attributes:
        name: As on the command line.
        dtype: Dtype of matrix products and convolutions.
        meaning: Short description.
        engine: "amp" for ``amp.initialize``, "autocast" for ``torch.autocast``, in fp16 with a
            ``GradScaler``.
        options: Arguments of ``amp.initialize``.
        fp32_weights: Whether the model's weights stay fp32.
        advised: Whether it may be recommended; the others are only compared with.
    """

    name: str
    dtype: torch.dtype
    meaning: str
    engine: Literal["amp", "autocast"] = "amp"
    options: Mapping[str, Any] = field(default_factory=dict)
    fp32_weights: bool = True
    advised: bool = True

    @property
    def short_dtype(self) -> str:
        """The dtype's short name, such as ``"bf16"``."""
        return short(dtypes.name(self.dtype))


BASELINE = "O0"

_ALL = (
    Variant("O0", torch.float32, "fp32 throughout", advised=False),
    Variant("O1", torch.float16, "fp16 where it is safe, fp32 weights"),
    Variant("O2", torch.float16, "fp16 model, fp32 batch norm and masters", fp32_weights=False),
    Variant("O3", torch.float16, "fp16 throughout, no masters", fp32_weights=False, advised=False),
    Variant("O4", torch.bfloat16, "bf16 where it is safe, fp32 weights"),
    Variant("O5", torch.bfloat16, "bf16 model, fp32 batch norm and masters", fp32_weights=False),
    Variant("autocast-fp16", torch.float16, "torch.autocast and GradScaler", engine="autocast"),
    Variant("autocast-bf16", torch.bfloat16, "torch.autocast", engine="autocast"),
    Variant(
        "bf16",
        torch.bfloat16,
        "bf16 throughout, no masters",
        options={"opt_level": "O5", "master_weights": False, "keep_batchnorm_fp32": False},
        fp32_weights=False,
        advised=False,
    ),
)

VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in _ALL}
"""By name, in display order."""


def parse_variants(names: str) -> tuple[Variant, ...]:
    """Returns the variants in a list such as ``"O0,O4,autocast-bf16"``, in display order.

    The baseline is always included.

    Raises:
        InputError: For an unknown name.
    """
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(wanted - VARIANTS.keys())
    if unknown or not wanted:
        raise InputError(
            f"no level {', '.join(map(repr, unknown)) or repr(names)}; choose from "
            f"{', '.join(VARIANTS)}, separated by commas"
        )
    return tuple(v for v in _ALL if v.name in wanted or v.name == BASELINE)
