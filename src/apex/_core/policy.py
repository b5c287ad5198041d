"""What one level of mixed precision asks for, in today's terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

LossScale = float | Literal["dynamic"]
"""A static multiplier on the loss, or ``"dynamic"`` for one that follows the gradients."""


@dataclass(frozen=True)
class Policy:
    """The decisions that every part of a session reads; a value, never changed.

    Attributes:
        opt_level: Name of the level it came from, ``"O0"`` to ``"O5"``.
        param_dtype: Type of the model's parameters and inputs; ``None`` leaves them.
        compute_dtype: Low-precision type of the op casts; ``None`` means no op casts.
        output_dtype: Type of the model's floating outputs; ``None`` leaves them.
        batchnorm_fp32: Whether batch norm stays in fp32 when ``param_dtype`` is lower.
        master_weights: Whether the optimizer steps fp32 copies of low-precision parameters.
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
        """The 16-bit type that this policy computes in; ``None`` when it is all fp32."""
        for dtype in (self.compute_dtype, self.param_dtype):
            if dtype in (torch.float16, torch.bfloat16):
                return dtype
        return None

    def with_loss_scale(self, loss_scale: LossScale) -> Policy:
        """Returns the policy with another loss scale."""
        return replace(self, loss_scale=loss_scale)
