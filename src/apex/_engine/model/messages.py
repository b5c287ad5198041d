"""What amp says of a prepared model: the remedy of dtype errors, and buffers that lose values."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import makes_equal
from apex._engine.model.plan import WIDE, ModelPlan, planned_dtypes

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

_HOLDS = (
    "amp prepared the model {model} to compute in {dtype}, but it now holds {found}, cast, added "
    "or assigned after amp.initialize, or passed to functional_call. Call .to({dtype}) on it, or "
    "assign and pass value.to(param.dtype); pass the parameters of an added module to "
    "optimizer.add_param_group, which also makes their fp32 masters; make a copy of the model "
    "plain with amp.restore(copy)."
)
_COMPUTES = (
    "amp prepared the model {model} to compute in 16 bits. A tensor that the forward makes itself, "
    "or that another method gets, is not cast. Cast it, as in x.to(self.linear.weight.dtype). If "
    "an operator has no 16-bit kernel, keep its module in fp32: amp.initialize(..., "
    "fp32_modules=[...]) takes names and types, such as "
    "torch.nn.utils.parametrize.ParametrizationList. A mask takes a number that 16 bits hold: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min)."
)

_MANY = 4
"""Above so many modules, those that differ in a number are written as one pattern."""


def mixes_dtypes(error: RuntimeError) -> bool:
    """Returns whether an operator failed because its inputs have different dtypes."""
    return _MIXED_INPUTS.search(str(error)) is not None


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Raises ``error`` again with its remedy, of the same type and caused by it.

    Returns if the plan's dtypes are not its cause, or if it has a remedy already.
    """
    kind, text = type(error), str(error)
    # Scripts catch subclasses, such as out of memory, by name.
    if kind not in (RuntimeError, NotImplementedError) or isinstance(error.__cause__, kind):
        return
    no_room, mixed = _NO_ROOM.search(text), mixes_dtypes(error)
    if not (no_room or _NO_KERNEL.search(text) or (mixed and not _NOT_FLOATING.search(text))):
        return  # the same call fails in fp32
    found = _of_another_dtype(model, plan) if mixed and not no_room else []
    if found or no_room or plan.casts_down:
        listed = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        name, dtype = type(model).__name__, plan.param_dtype or torch.float32
        remedy = (_HOLDS if found else _COMPUTES).format(model=name, dtype=dtype, found=listed)
        raise kind(f"{error}\n{remedy}") from error


def _of_another_dtype(model: nn.Module, plan: ModelPlan) -> list[str]:
    """Returns the names and dtypes of parameters and buffers that differ from the plan's."""
    planned: Iterable[tuple[str, Tensor, torch.dtype]] = planned_dtypes(model, plan)
    if plan.param_dtype is None:
        planned = [(name, param, torch.float32) for name, param in model.named_parameters()]
    return [
        f"{name} ({dtypes.name(tensor.dtype)})"
        for name, tensor, dtype in planned
        if dtypes.is_castable(tensor) and tensor.dtype is not dtype
    ]


def log_lost(model: nn.Module, before: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Logs the buffers whose distinct values rounding made equal, such as positions above 256.

    ``before`` holds tensors of the converted model with their values before conversion.
    """
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    rounded = [
        (names[id(tensor)], makes_equal(exact, tensor.dtype))
        for tensor, exact in before
        if id(tensor) in names and exact.dtype in WIDE and dtypes.is_low_precision(tensor)
        if exact.numel() > 1 and exact.layout is torch.strided
    ]
    found = [name for name, lost in rounded if lost.item()]  # sync: before training begins
    if found:
        _log.warning(
            "amp: in %s, rounding to 16 bits makes distinct values equal in %s. %s",
            *(type(model).__name__, ", ".join(found), keeping(found)),
        )


def keeping(names: Sequence[str]) -> str:
    """Returns a sentence with the arguments of ``initialize`` that keep tensors in fp32."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if len(modules) > _MANY:
        numbers = r"(^|(?<=\.))\d+(?=\.|$)"
        modules = list(dict.fromkeys(re.sub(numbers, "*", name) for name in modules))
    inside = [name for name in modules if name]
    own = [name for name in names if "." not in name]
    lines = [f"fp32_modules={inside!r}"] if inside else []
    lines += [f"fp32_buffers={own!r} (cast what is computed from them)"] if own else []
    return f"To keep them in fp32: amp.initialize(..., {', '.join(lines)})."
