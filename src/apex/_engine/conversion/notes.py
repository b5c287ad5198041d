"""Messages about a prepared model: fixes for dtype errors, and values that rounding loses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import loses_order
from apex._engine.conversion.plan import WIDE, ModelPlan, planned_dtypes
from apex._engine.conversion.state_dict import AVERAGE
from apex._torch import errors
from apex._torch.copies import has_values
from apex._torch.modules import named_parameters

_log = logging.getLogger("apex")

_PREPARED = "amp.initialize prepared the model "
_HOLDS = (
    _PREPARED + "{model} to compute in {dtype}, but it now contains {found}: tensors that were "
    "cast, added or assigned later, or passed to functional_call. What to do:\n"
    "- a module added later: call optimizer.add_param_group({{'params': module.parameters()}}), "
    "which also creates fp32 masters; for inference, module.to({dtype})\n"
    "- a value that you assign or pass: use value.to(param.dtype)\n"
    "- a copy of the model: make it plain with amp.restore(copy)"
)
_COMPUTES = (
    _PREPARED + "{model} to compute in 16 bits. It casts only the arguments of forward(). "
    "What to do:\n"
    "- a tensor created inside forward(), or passed to another method: cast it, as in "
    "x.to(self.linear.weight.dtype)\n"
    "- an operator without a 16-bit kernel: keep its module in fp32, "
    "amp.initialize(..., fp32_modules=[...]), by name or type, such as "
    "torch.nn.utils.parametrize.ParametrizationList\n"
    "- a mask value that 16 bits cannot represent: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min)"
)


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Adds the remedy to the text of an error that torch raised for the plan's dtypes."""
    fault, text = errors.fault_of_16_bits(error), str(error)
    if fault is None or _PREPARED in text:  # by a method, or another prepared model, inside
        return
    others = _of_another_dtype(model, plan) if fault == "mixed" else []
    if others or fault == "no room" or plan.casts_down:
        listed = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        name, dtype = type(model).__name__, plan.param_dtype or torch.float32
        remedy = (_HOLDS if others else _COMPUTES).format(model=name, dtype=dtype, found=listed)
        error.args = (f"{text}\n{remedy}",)


def _of_another_dtype(model: nn.Module, plan: ModelPlan) -> list[str]:
    """Returns the names and dtypes of parameters and buffers that differ from the plan's."""
    planned: Iterable[tuple[str, Tensor, torch.dtype]] = planned_dtypes(model, plan)
    if plan.param_dtype is None:
        planned = [(name, param, torch.float32) for name, param in named_parameters(model)]
    return [
        f"{name} ({dtypes.name(tensor.dtype)})"
        for name, tensor, dtype in planned
        if dtypes.is_castable(tensor) and tensor.dtype is not dtype
    ]


def log_lost(model: nn.Module, before: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Logs the buffers whose order rounding loses, such as positions above 256.

    ``before`` holds tensors of the converted model with their values before conversion.
    """
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    lost = []
    for tensor, exact in before:
        is_rounded = exact.dtype in WIDE and dtypes.is_low_precision(tensor)
        if id(tensor) in names and is_rounded and has_values(exact):
            lost.append((names[id(tensor)], loses_order(exact, tensor.dtype)))
    listed = [name for name, is_lost in lost if is_lost.item()]  # sync: before training begins
    if listed:
        _log.warning(
            "amp: in %s, rounding to 16 bits makes ordered values equal in %s. %s",
            *(type(model).__name__, ", ".join(listed), keeping(model, listed)),
        )


def keeping(model: nn.Module, names: Sequence[str]) -> str:
    """Returns a sentence with the arguments of ``initialize`` that keep tensors in fp32."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name))
    buffers = [name for name in names if name in model._buffers]
    lines = [f"fp32_modules={modules!r}"] if modules else []
    if buffers:
        lines.append(f"fp32_buffers={buffers!r} (cast what is computed from them)")
    return f"To keep them in fp32: amp.initialize(..., {', '.join(lines)})." if lines else AVERAGE
