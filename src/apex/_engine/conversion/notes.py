"""What amp says of a prepared model: remedies of dtype errors, and what rounding loses."""

from __future__ import annotations

import dis
import logging
import re
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import loses_order
from apex._engine.conversion.plan import WIDE, ModelPlan, planned_dtypes
from apex._engine.conversion.state_dict import AVERAGE
from apex._torch.copies import has_values
from apex._torch.modules import named_parameters

_log = logging.getLogger("apex")

_MIXED_INPUTS = re.compile(  # oneDNN says it of a state in another dtype
    "same dtype|scalar type|Half|BFloat16|primitive descriptor for (the|an) LSTM"
)
_NOT_FLOATING = re.compile(
    r"\b((unsigned |signed )?char|short|int|long|bool|byte)\b|Complex", re.IGNORECASE
)
_NO_ROOM = re.compile("value cannot be converted to type .*(Half|BFloat16) without overflow")
_NO_KERNEL = re.compile(
    "not implemented for '(Half|BFloat16)'|[Ll]ow precision dtypes not supported"
    "|Unsupported dtype (Half|BFloat16)|tensors(,? but got|( of type)?:) (Half|BFloat16)"
    "|[Ff]loat(,| or| and) [Dd]ouble"
)

_PREPARED = "amp prepared the model "
_HOLDS = (
    _PREPARED + "{model} to compute in {dtype}, but it now holds {found}, cast, added "
    "or assigned after amp.initialize, or passed to functional_call. Call .to({dtype}) on it, or "
    "assign and pass value.to(param.dtype); pass the parameters of an added module to "
    "optimizer.add_param_group, which also makes their fp32 masters; make a copy of the model "
    "plain with amp.restore(copy)."
)
_COMPUTES = (
    _PREPARED + "{model} to compute in 16 bits. A tensor that the forward makes itself, "
    "or that another method gets, is not cast. Cast it, as in x.to(self.linear.weight.dtype). If "
    "an operator has no 16-bit kernel, keep its module in fp32: amp.initialize(..., "
    "fp32_modules=[...]) takes names and types, such as "
    "torch.nn.utils.parametrize.ParametrizationList. A mask takes a number that 16 bits hold: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min)."
)


def mixes_dtypes(error: RuntimeError) -> bool:
    """Returns whether an operator failed because its inputs have different dtypes."""
    return _MIXED_INPUTS.search(str(error)) is not None


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Adds the remedy to the text of an error that torch raised for the plan's dtypes."""
    # Scripts catch subclasses, such as out of memory, by name.
    if type(error) not in (RuntimeError, NotImplementedError) or not _is_of_torch(error):
        return
    text = str(error)
    if _PREPARED in text:  # by a method, or another prepared model, inside
        return
    no_room = _NO_ROOM.search(text) is not None
    mixed = mixes_dtypes(error)
    mixed_floats = mixed and not _NOT_FLOATING.search(text)
    if not (no_room or mixed_floats or _NO_KERNEL.search(text)):
        return  # the same call fails in fp32
    others = _of_another_dtype(model, plan) if mixed and not no_room else []
    if others or no_room or plan.casts_down:
        listed = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        name, dtype = type(model).__name__, plan.param_dtype or torch.float32
        remedy = (_HOLDS if others else _COMPUTES).format(model=name, dtype=dtype, found=listed)
        error.args = (f"{text}\n{remedy}",)


def _is_of_torch(error: BaseException) -> bool:
    """Returns whether torch raised an error, and not a ``raise`` in other Python code."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    module: str = trace.tb_frame.f_globals.get("__name__", "")
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return module.startswith("torch.") or dis.opname[instruction] != "RAISE_VARARGS"


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
