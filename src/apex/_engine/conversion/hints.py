"""Adds the fix to errors that torch raises because of the dtypes of a prepared model."""

from __future__ import annotations

import torch
from torch import nn

from apex._core import dtypes
from apex._core.policy import Policy
from apex._engine.conversion.plan import ModelPlan, planned_dtypes
from apex._torch import errors

_PREPARED = "amp.initialize prepared the model "
_HOLDS = (
    _PREPARED + "{model} to compute in {dtype}, but it now contains {found}: tensors that were "
    "cast, added or assigned later, or passed to functional_call. What to do:\n"
    "- a module added later: call optimizer.add_param_group({{'params': module.parameters()}}), "
    "which casts it, and creates fp32 masters where the level has them; for inference, "
    "module.to({dtype})\n"
    "- a value or a parameter that you assign or pass: use value.to(param.dtype)"
)
_COMPUTES = (
    _PREPARED + "{model} to compute in 16 bits. It casts only the arguments of forward(). "
    "What to do:\n"
    "- a tensor created inside forward(), or passed to another method: cast it, as in "
    "x.to(self.linear.weight.dtype)\n"
    "- an operator without a 16-bit kernel, or a module that casts its input to fp32 itself: keep "
    "the module in fp32, amp.initialize(..., fp32_modules=[...]), by name or type, such as "
    "torch.nn.utils.parametrize.ParametrizationList"
)
_CASTS = (
    _PREPARED + "{model} to compute products in 16 bits, and this operator does not take what "
    "they return. What to do:\n"
    "- cast where you call it: x.float()\n"
    "- or let amp cast the arguments of your function that calls it: "
    "amp.register_float_function(module, 'function') before amp.initialize"
)
_NO_ROOM = (
    _PREPARED + "{model} to compute in 16 bits, which cannot represent the value. What to do:\n"
    "- take the number from the tensor itself: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min)\n"
    "- or keep the module in fp32: at O1 and O4, "
    "amp.register_float_function(type(module), 'forward') before amp.initialize; at O2, O3 and O5, "
    "amp.initialize(..., fp32_modules=[type(module)]), for a part of the model"
)
_HOOK = (
    "A hook on a 16-bit parameter or activation gets a 16-bit gradient, and must return one: "
    "(grad * mask).to(grad.dtype)"
)


def explain_hook(error: RuntimeError) -> None:
    """Adds the fix to the text of an error that a hook on a 16-bit tensor has caused."""
    if errors.is_of_16_bit_hook(error):
        error.args = (f"{error}\n{_HOOK}",)


def explain(model: nn.Module, plan: ModelPlan, policy: Policy, error: RuntimeError) -> None:
    """Adds the fix to the text of an error that torch raised because of amp's dtypes."""
    fault = errors.fault_of_16_bits(error)
    text = str(error)
    if fault is None or _PREPARED in text:  # by a method, or another prepared model, inside
        return
    others: list[str] = []
    if fault == "mixed":
        for name, tensor, dtype in planned_dtypes(model, plan):
            if dtypes.is_castable(tensor) and tensor.dtype is not dtype:
                others.append(f"{name} ({dtypes.name(tensor.dtype)})")
    if fault == "no room":
        message = _NO_ROOM
    elif others:
        message = _HOLDS
    elif plan.casts_down:
        message = _COMPUTES
    elif policy.compute_dtype is not None:
        message = _CASTS
    else:
        return
    fix = message.format(
        model=type(model).__name__,
        dtype=plan.param_dtype or torch.float32,
        found=", ".join(others[:4]),
    )
    error.args = (f"{text}\n{fix}",)
