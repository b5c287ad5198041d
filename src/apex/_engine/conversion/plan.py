"""The dtypes of a converted model's parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import dtypes
from apex._torch.modules import ORTHOGONAL, modules_in, own_tensors

WIDE = (torch.float32, torch.float64)

FP32_BUFFERS = ("inv_freq", "*.inv_freq")
"""Patterns of the buffers that stay in fp32 in every model: frequencies of rotary embeddings."""

FP32_MODULES = (ORTHOGONAL,)
"""Modules that compute in fp32 in every model, as their 16-bit results would be garbage."""


@dataclass(frozen=True)
class ModelPlan:
    """The dtypes of a converted model; ``None`` leaves a dtype unchanged.

    Attributes:
        param_dtype: Dtype of parameters and buffers, and of every floating tensor passed to
            ``forward``.
        output_dtype: Dtype of every floating tensor that ``forward`` returns.
        keep_batchnorm_fp32: Whether batch norm layers stay in fp32. Their inputs are not cast, and
            their output has the dtype of their input.
        cast: Casts the floating tensors in inputs and outputs to a dtype, in place of amp's own
            cast; ``None`` for amp's own.
        widen_low: Whether 16-bit parameters and buffers become fp32 if ``param_dtype`` is ``None``,
            because operators cast. Float64 parameters are then rejected.
        fp32_modules: Module types and ``fnmatch`` patterns over qualified names. Matching modules
            and their submodules stay and compute in fp32: their inputs are cast to fp32, their
            outputs back to ``param_dtype``. In addition to :data:`FP32_MODULES`.
        fp32_inputs: Names of arguments of ``forward`` that are not cast; of those in ``*args``,
            positions.
        fp32_buffers: Patterns over qualified names of buffers that stay in fp32, in addition to
            :data:`FP32_BUFFERS`.
    """

    param_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    keep_batchnorm_fp32: bool
    cast: Callable[[Any, torch.dtype], Any] | None
    widen_low: bool
    fp32_modules: tuple[type[nn.Module] | str, ...] = ()
    fp32_inputs: tuple[str | int, ...] = ()
    fp32_buffers: tuple[str, ...] = ()

    @functools.cached_property
    def casts_down(self) -> bool:
        """Whether parameters are cast to a 16-bit type."""
        return self.param_dtype in dtypes.LOW_PRECISION

    def without_calls(self) -> ModelPlan:
        """Returns the plan of an fp32 model whose arguments and outputs others cast (FSDP2)."""
        return replace(self, param_dtype=None, output_dtype=None, widen_low=True)


def modules_in_fp32(model: nn.Module, plan: ModelPlan) -> dict[nn.Module, bool]:
    """Returns the modules that compute in fp32, each with whether it is the outermost one."""
    chosen: dict[nn.Module, bool] = {}
    rules = (*FP32_MODULES, *plan.fp32_modules)
    for name, module in named_submodules(model):
        if module in chosen:
            continue
        is_chosen = any(matches(rule, name, module) for rule in rules)
        if is_chosen:
            for part in modules_in(module):
                is_outermost = part is module
                chosen.setdefault(part, is_outermost)
    return chosen


def planned_dtypes(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yields every parameter and buffer, once, with its qualified name and planned dtype.

    The planned dtype of a tensor that is not cast is its own. A tensor that an fp32 module shares
    with another module is planned as fp32.
    """
    kept = set(modules_in_fp32(model, plan))
    if plan.keep_batchnorm_fp32:
        for module in modules_in(model):
            if isinstance(module, _BatchNorm):
                kept.update(modules_in(module))  # also its parametrizations
    seen = set[int]()
    # fp32 modules first, because the first to yield a shared tensor decides.
    modules = sorted(model.named_modules(), key=lambda item: item[1] not in kept)
    for name, module in modules:
        for key, tensor in own_tensors(module, name):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            dtype = plan.param_dtype or tensor.dtype
            if plan.casts_down:
                if module in kept or _is_fp32_buffer(plan, key, tensor):
                    dtype = torch.float32
            elif plan.widen_low and dtypes.is_low_precision(tensor):
                dtype = torch.float32
            yield key, tensor, dtype


def _is_fp32_buffer(plan: ModelPlan, name: str, tensor: Tensor) -> bool:
    """Returns whether a tensor is a buffer that stays in fp32 by its name."""
    if isinstance(tensor, nn.Parameter) or tensor.dtype not in WIDE:
        return False
    patterns = (*FP32_BUFFERS, *plan.fp32_buffers)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def named_submodules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the submodules of ``model`` under each of their names, parents first."""
    for name, module in model.named_modules(remove_duplicate=False):
        if name:  # keeping the model itself in fp32 would convert nothing
            yield name, module


def matches(rule: object, name: str, module: nn.Module) -> bool:
    """Returns whether an entry of ``fp32_modules`` matches a module."""
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    return isinstance(rule, type) and isinstance(module, rule)
