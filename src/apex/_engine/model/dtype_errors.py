"""Adds the remedy to errors about dtypes in the forward pass of a prepared model."""

from __future__ import annotations

import re

import torch
from torch import nn

from apex._core import dtypes
from apex._engine.model.kept_buffers import KeptBuffer
from apex._engine.model.plan import ModelPlan, planned_dtypes
from apex._engine.model.state import is_converted

_LSTM = "primitive descriptor for (the|an) LSTM"  # oneDNN: of a state in another dtype
_ABOUT_DTYPES = re.compile(f"type|Half|BFloat16|Float|{_LSTM}")
_MIXED_INPUTS = re.compile(f"same dtype|scalar type|Half|BFloat16|{_LSTM}")
_NOT_FLOATING = re.compile(
    r"\b((unsigned |signed )?char|short|int|long|bool|byte)\b|Complex", re.IGNORECASE
)
_NO_ROOM = re.compile("value cannot be converted to type .*(Half|BFloat16) without overflow")
_NO_KERNEL = re.compile(
    "not implemented for '(Half|BFloat16)'|Low precision dtypes not supported"
    "|Unsupported dtype (Half|BFloat16)|tensors(,? but got|( of type)?:) (Half|BFloat16)"
    "|[Ff]loat(,| or| and) [Dd]ouble"
)


_TOO_LARGE = (
    "Under amp, {model} computes that tensor in 16 bits, which cannot hold the number. Mask with "
    "the least number of the tensor's own dtype, as in "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min), or use a bf16 level."
)
_UNEVEN = (
    "amp prepared the model {model} with parameters in fp32, but it now holds {found}, cast or "
    "added after amp.initialize. Call model.float()."
)
_WITHOUT_KERNEL = (
    "An operator of the model {model} has no 16-bit kernel. Keep its module in fp32 with "
    "amp.initialize(..., fp32_modules=[...]), which takes types and names; for parametrizations "
    "such as orthogonal, torch.nn.utils.parametrize.ParametrizationList."
)
_MIXED = (
    "amp prepared the model {model} to compute in {dtype}, but it now holds {found}, added or "
    "replaced after amp.initialize, assigned (param.data = value) or passed to functional_call. To "
    "cast an added module and make its fp32 masters, pass its parameters to "
    "optimizer.add_param_group; if no optimizer trains it, call .to({dtype}). Assign or pass "
    "value.to(param.dtype). If a copy of the model was cast as a whole, make it plain with "
    "amp.restore(copy)."
)
_READ = (
    "amp keeps these buffers of the model {model} in fp32, since its state_dict leaves them out: "
    "{found}. They take the dtype of 16-bit tensors that they meet, but code that reads their "
    "dtype (x.to(buffer.dtype)) or casts them (buffer.float()) computes in fp32 and must cast what "
    "it returns: result.to(x.dtype)."
)
_INSIDE = (
    "amp.initialize got {found} of the model {model} as a model, too, whose outputs it casts. Pass "
    "only the model around it."
)
_MADE = (
    "amp prepared the model {model} to compute in {dtype}: its parameters and the inputs of its "
    "forward are cast, but a tensor that the forward makes itself or finds elsewhere is not. Cast "
    "it, as in x.to(self.linear.weight.dtype), or keep the module that takes it in fp32 with "
    "amp.initialize(..., fp32_modules=[...]). Levels O1 and O4 cast around operators and need "
    "neither."
)


def mixes_dtypes(error: RuntimeError) -> bool:
    """Returns whether an operator failed because its inputs have different dtypes."""
    return _MIXED_INPUTS.search(str(error)) is not None


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Raises a forward pass's ``error`` again with its remedy, of the same type and caused by it.

    Returns if the plan's dtypes are not its cause.
    """
    kind, text = type(error), str(error)
    # Scripts catch subclasses, such as out of memory, by name.
    if kind not in (RuntimeError, NotImplementedError):
        return
    # Nothing casts integers or complex numbers: the same call fails in fp32.
    mixes = mixes_dtypes(error) and not _NOT_FLOATING.search(text)
    remedy, found = None, []
    if _NO_ROOM.search(text):
        remedy = _TOO_LARGE
    elif not plan.casts_down:
        found = _not_in(plan.input_dtype or torch.float32, model)
        remedy = _UNEVEN if found and mixes else None
    elif _NO_KERNEL.search(text):
        remedy = _WITHOUT_KERNEL
    elif _ABOUT_DTYPES.search(text):
        remedy, found = _remedy(model, plan, mixes=mixes)
    if remedy is not None:
        listed = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        name, dtype = type(model).__name__, plan.param_dtype
        raise kind(f"{error}\n{remedy.format(model=name, dtype=dtype, found=listed)}") from error


def _remedy(model: nn.Module, plan: ModelPlan, *, mixes: bool) -> tuple[str | None, list[str]]:
    """Returns the remedy of an error in a 16-bit model, and the names that it lists."""
    planned = list(planned_dtypes(model, plan))
    mismatches = [
        f"{name} ({dtypes.name(tensor.dtype)})"
        for name, tensor, dtype, yields in planned
        if dtypes.is_castable(tensor)
        and (tensor.dtype is not dtype or (yields and not isinstance(tensor, KeptBuffer)))
    ]
    if mismatches or not mixes:
        return (_MIXED if mismatches else None), mismatches
    if kept := [each.name for each in planned if each.yields]:
        return _READ, kept
    inside = [name for name, part in model.named_modules() if name and is_converted(part)]
    return (_INSIDE if inside else _MADE), inside


def _not_in(dtype: torch.dtype, model: nn.Module) -> list[str]:
    """Returns the names and dtypes of floating-point parameters of another dtype."""
    return [
        f"{name} ({dtypes.name(param.dtype)})"
        for name, param in model.named_parameters()
        if dtypes.is_castable(param) and param.dtype is not dtype
    ]
