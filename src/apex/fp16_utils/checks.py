"""Validates the arguments of ``FP16_Optimizer`` before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from apex._core import dtypes
from apex._engine import master_wrapper

_KEYS = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
)


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError unless it is an optimizer over fp16, bf16 and fp32 parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or isinstance(optimizer, master_wrapper.MasterWrapper):
        raise TypeError(
            f"FP16_Optimizer got {type(optimizer).__name__}; it wraps an optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    accepted = (*dtypes.LOW_PRECISION, torch.float32)
    for param in (param for group in groups for param in group["params"]):
        if param.requires_grad and param.dtype not in accepted:
            raise TypeError(
                f"FP16_Optimizer got a parameter of {param.dtype} and shape {tuple(param.shape)}; "
                "it takes float16, bfloat16 and float32."
            )


def check_state(state_dict: Any, groups: list[list[nn.Parameter]]) -> None:
    """Raises ValueError if a state dict does not fit the masters in ``groups``."""
    master_wrapper.check_state(state_dict, _KEYS)
    saved = [[tuple(param.shape) for param in group] for group in state_dict["fp32_from_fp16"]]
    own = [[tuple(param.shape) for param in group] for group in groups]
    if saved != own:
        raise ValueError(
            f"FP16_Optimizer.load_state_dict got masters of shapes {saved}; this one has {own}. "
            "Build the optimizer over the same half-precision model as the saved one."
        )
