"""Hooks that let one module compute in fp32 inside a low-precision model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from apex._core import tree


def attach(modules: Iterable[nn.Module], dtype: torch.dtype) -> list[RemovableHandle]:
    """Casts the inputs of each module to fp32 and its outputs to ``dtype``, until removed."""
    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(inputs_to_fp32, with_kwargs=True))
        handles.append(module.register_forward_hook(OutputCast(dtype)))
    return handles


def inputs_to_fp32(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook; named in this module, so that models with it pickle."""
    return tree.cast_arguments(args, kwargs, torch.float32)


@dataclass(frozen=True)
class OutputCast:
    """A forward hook that casts floating outputs; an object, so that models with it pickle."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns ``output`` with every floating tensor in the dtype."""
        return tree.cast_tensors(output, self.dtype)
