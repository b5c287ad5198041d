"""The settings of one level of mixed precision, in current terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from apex._core.dtypes import LOW_PRECISION

LossScale = float | Literal["dynamic"]
"""A static multiplier on the loss, or ``"dynamic"`` for one that follows the gradients."""


@dataclass(frozen=True)
class Policy:
    """The settings that every part of a session reads.

    Attributes:
        opt_level: Name of the level, ``"O0"`` to ``"O5"``.
        param_dtype: Dtype of the model's parameters and inputs; ``None`` keeps theirs.
        compute_dtype: Low-precision dtype of the op casts; ``None`` means no op casts.
        output_dtype: Dtype of the model's floating-point outputs; ``None`` keeps theirs.
        batchnorm_fp32: Whether batch norm stays in fp32 when ``param_dtype`` is lower.
        master_weights: Whether the optimizer steps fp32 masters of low-precision parameters.
        loss_scale: Multiplier on the loss, or ``"dynamic"``.
    """

    opt_level: str
    param_dtype: torch.dtype | None
    compute_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    batchnorm_fp32: bool
    master_weights: bool
    loss_scale: LossScale

    @property
    def low_precision(self) -> torch.dtype | None:
        """The 16-bit dtype of the computation; ``None`` if there is none."""
        if self.param_dtype in LOW_PRECISION:
            return self.param_dtype
        return self.compute_dtype
