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
_MIXED = re.compile(f"same dtype|scalar type|Half|BFloat16|{_LSTM}")
_NOT_FLOATING = re.compile(
    r"\b((unsigned |signed )?char|short|int|long|bool|byte)\b|Complex", re.IGNORECASE
)
_NO_ROOM = re.compile("value cannot be converted to type .*(Half|BFloat16) without overflow")
_NO_KERNEL = re.compile(
    "not implemented for '(Half|BFloat16)'|Low precision dtypes not supported"
    "|Unsupported dtype (Half|BFloat16)|tensors(,? but got|( of type)?:) (Half|BFloat16)"
    "|[Ff]loat(,| or| and) [Dd]ouble"
)


def mixes_dtypes(error: RuntimeError) -> bool:
    """Returns whether an operator failed because its inputs have different dtypes."""
    return _MIXED.search(str(error)) is not None


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Raises ``error`` again with its remedy; returns if the plan's dtypes are not its cause.

    Args:
        model: A prepared model whose forward pass failed.
        plan: Its conversion.
        error: The forward pass's error.

    Raises:
        RuntimeError: Of the type of ``error``, and caused by it.
    """
    kind = type(error)
    # Scripts catch subclasses, such as out of memory, by name.
    if kind not in (RuntimeError, NotImplementedError):
        return
    if _NO_ROOM.search(str(error)):
        raise kind(f"{error}\n{_too_large(model)}") from error
    if not plan.casts_down:
        cast = _not_in(plan.input_dtype or torch.float32, model)
        if cast and mixes_dtypes(error) and not _NOT_FLOATING.search(str(error)):
            raise kind(f"{error}\n{_uneven(model, cast)}") from error
        return
    if _NO_KERNEL.search(str(error)):
        raise kind(f"{error}\n{_without_kernel(model)}") from error
    if _ABOUT_DTYPES.search(str(error)):
        if mismatches := _mismatches(model, plan):
            raise kind(f"{error}\n{_mixed(model, plan, mismatches)}") from error
        # Nothing casts integers or complex numbers: the same call fails in fp32.
        if mixes_dtypes(error) and not _NOT_FLOATING.search(str(error)):
            kept = [each.name for each in planned_dtypes(model, plan) if each.yields]
            cause = _read(model, kept) if kept else _made(model, plan)
            raise kind(f"{error}\n{cause}") from error


def _mismatches(model: nn.Module, plan: ModelPlan) -> list[str]:
    """Returns the names and dtypes of tensors whose dtype differs from the plan's."""
    return [
        f"{name} ({dtypes.name(tensor.dtype)})"
        for name, tensor, dtype, yields in planned_dtypes(model, plan)
        if dtypes.is_castable(tensor)
        and (tensor.dtype is not dtype or (yields and not isinstance(tensor, KeptBuffer)))
    ]


def _not_in(dtype: torch.dtype, model: nn.Module) -> list[str]:
    """Returns the names and dtypes of floating-point parameters of another dtype."""
    return [
        f"{name} ({dtypes.name(param.dtype)})"
        for name, param in model.named_parameters()
        if dtypes.is_castable(param) and param.dtype is not dtype
    ]


def _uneven(model: nn.Module, cast: list[str]) -> str:
    return (
        f"amp prepared the model {type(model).__name__} with parameters in fp32, but it now holds "
        f"{_shown(cast)}, cast or added after amp.initialize. Call model.float()."
    )


def _mixed(model: nn.Module, plan: ModelPlan, mismatches: list[str]) -> str:
    return (
        f"amp prepared the model {type(model).__name__} to compute in {plan.param_dtype}, but it "
        f"now holds {_shown(mismatches)}, added or replaced after amp.initialize, assigned "
        "(param.data = value) or passed to functional_call. To cast an added module and make its "
        "fp32 masters, pass its parameters to optimizer.add_param_group; if no optimizer trains "
        f"it, call .to({plan.param_dtype}). Assign or pass value.to(param.dtype). If a copy "
        "of the model was cast as a whole, make it plain with amp.restore(copy)."
    )


def _read(model: nn.Module, kept: list[str]) -> str:
    return (
        f"amp keeps these buffers of the model {type(model).__name__} in fp32, since its "
        f"state_dict leaves them out: {_shown(kept)}. They take the dtype of 16-bit tensors that "
        "they meet, but code that reads their dtype (x.to(buffer.dtype)) or casts them "
        "(buffer.float()) computes in fp32 and must cast what it returns: result.to(x.dtype)."
    )


def _made(model: nn.Module, plan: ModelPlan) -> str:
    parts = [name for name, part in model.named_modules() if name and is_converted(part)]
    if parts:
        return (
            f"amp.initialize got {_shown(parts)} of the model {type(model).__name__} as a model, "
            "too, whose outputs it casts. Pass only the model around it."
        )
    return (
        f"amp prepared the model {type(model).__name__} to compute in {plan.param_dtype}: its "
        "parameters and the inputs of its forward are cast, but a tensor that the forward makes "
        "itself or finds elsewhere is not. Cast it, as in x.to(self.linear.weight.dtype), or keep "
        "the module that takes it in fp32 with amp.initialize(..., fp32_modules=[...]). Levels O1 "
        "and O4 cast around operators and need neither."
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _too_large(model: nn.Module) -> str:
    return (
        f"Under amp, {type(model).__name__} computes that tensor in 16 bits, which cannot hold the "
        "number. Mask with the least number of the tensor's own dtype, as in "
        "scores.masked_fill(mask, torch.finfo(scores.dtype).min), or use a bf16 level."
    )


def _without_kernel(model: nn.Module) -> str:
    return (
        f"An operator of the model {type(model).__name__} has no 16-bit kernel. Keep its module in "
        "fp32 with amp.initialize(..., fp32_modules=[...]), which takes types and names; for "
        "parametrizations such as orthogonal, torch.nn.utils.parametrize.ParametrizationList."
    )
