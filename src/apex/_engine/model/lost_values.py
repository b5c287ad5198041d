"""Names the buffers whose distinct values become equal in 16 bits, such as positions above 256."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import makes_equal
from apex._engine.model.kept_buffers import attach
from apex._engine.model.plan import WIDE, ModelPlan, Parts, Planned, planned_dtypes
from apex._torch.modules import has_buffers, named_modules

_log = logging.getLogger("apex")

_MANY = 4
"""Above so many modules, those that differ in a number are written as one pattern."""


def find_lost(model: nn.Module, plan: ModelPlan, parts: Parts | None = None) -> list[Planned]:
    """Returns the buffers, of ``parts`` or the model, whose distinct values rounding makes equal.

    Changes nothing; the buffers are not rounded yet.
    """
    low = plan.param_dtype
    if low is None or not plan.casts_down:
        return []
    parts = named_modules(model).items() if parts is None else parts
    parts = [part for part in parts if has_buffers(part[1])]
    found = [
        each
        for each in planned_dtypes(model, plan, parts)
        if type(each.tensor) is Tensor
        and each.tensor.layout is torch.strided
        and each.tensor.dtype in WIDE
        and (each.yields or each.dtype is low)
        and each.tensor.numel() > 1
    ]
    by_device: dict[torch.device, list[Planned]] = {}
    for each in found:
        by_device.setdefault(each.tensor.device, []).append(each)
    lost: list[Planned] = []
    for some in by_device.values():
        flags = torch.stack([makes_equal(each.tensor, low) for each in some])
        # sync: once for each device, before training begins
        lost += [each for each, flag in zip(some, flags.tolist(), strict=True) if flag]
    return lost


def name_lost(model: nn.Module, plan: ModelPlan, lost: Sequence[Planned]) -> None:
    """Logs once what the conversion of ``model`` has rounded of what :func:`find_lost` found.

    A buffer that stays in fp32 is named where it is first rounded.
    """
    rounded = [each.name for each in lost if not each.yields]
    if rounded:
        _log.warning(_text(model, plan, rounded, ""))
    for each in lost:
        if each.yields:
            text = _text(model, plan, [each.name], " where it meets 16 bits")
            attach(each.tensor, functools.cache(functools.partial(_log.warning, text)))  # once


def _text(model: nn.Module, plan: ModelPlan, names: Sequence[str], where: str) -> str:
    low = "" if plan.param_dtype is None else dtypes.name(plan.param_dtype)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    of_model = [name for name in names if "." not in name]
    text = (
        f"amp: in {type(model).__name__}, rounding to {low}{where} makes distinct values equal in "
        f"the buffer{'s' if len(names) > 1 else ''} {', '.join(names)}."
    )
    if any(modules):
        text += f" To compute in fp32 there: fp32_modules={_patterns(modules)!r}."
    if of_model:
        text += f" Put {', '.join(of_model)} into a module of its own, which fp32_modules can name."
    return text


def _patterns(modules: Sequence[str]) -> list[str]:
    named = [name for name in modules if name]
    if len(named) <= _MANY:
        return named
    return list(dict.fromkeys(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) for name in named))
