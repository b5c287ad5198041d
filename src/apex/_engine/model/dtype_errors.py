"""Adds the remedy to errors about dtypes in the forward pass of a converted model."""

from __future__ import annotations

import re

from torch import nn

from apex._core import dtypes
from apex._engine.model.plan import ModelPlan, planned_dtypes

_ABOUT_DTYPES = re.compile("type|Half|BFloat16|Float")
_NO_KERNEL = re.compile("not implemented for '(Half|BFloat16)'|Low precision dtypes not supported")


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Raises ``error`` again with its remedy; returns if the plan's dtypes are not its cause.

    Args:
        model: A converted model whose forward pass failed.
        plan: Its conversion.
        error: What the forward pass raised.

    Raises:
        RuntimeError: Of the type of ``error``, and caused by it.
    """
    kind = type(error)
    # Subclasses (out of memory) are what scripts catch by name.
    if not plan.casts_down or kind not in (RuntimeError, NotImplementedError):
        return
    if _NO_KERNEL.search(str(error)):
        raise kind(f"{error}\n{_without_kernel(model)}") from error
    if _ABOUT_DTYPES.search(str(error)):
        strays = _strays(model, plan)
        if strays:
            raise kind(f"{error}\n{_mixed(model, plan, strays)}") from error


def _strays(model: nn.Module, plan: ModelPlan) -> list[str]:
    """Returns names and dtypes of the tensors whose dtype differs from the plan's."""
    return [
        f"{name} ({dtypes.name(tensor.dtype)})"
        for name, tensor, dtype in planned_dtypes(model, plan)
        if dtypes.is_castable(tensor) and tensor.dtype is not dtype
    ]


def _mixed(model: nn.Module, plan: ModelPlan, strays: list[str]) -> str:
    shown = ", ".join(strays[:4]) + (", ..." if len(strays) > 4 else "")
    return (
        f"amp prepared the model {type(model).__name__} to compute in {plan.param_dtype}, but it "
        f"now holds {shown}: added or replaced after amp.initialize, or given to functional_call. "
        "For what was added, optimizer.add_param_group with its parameters casts it and makes "
        f"fp32 masters; for what no optimizer trains, call .to({plan.param_dtype}). Give "
        "functional_call values that are cast: value.to(param.dtype). A copy that was cast as a "
        "whole is made plain by amp.restore(copy)."
    )


def _without_kernel(model: nn.Module) -> str:
    return (
        f"This operator of the model {type(model).__name__} has no 16-bit form. Keep its module in "
        "fp32 by amp.initialize(..., fp32_modules=[...]), which takes types and names; for "
        "parametrizations such as orthogonal: torch.nn.utils.parametrize.ParametrizationList."
    )
