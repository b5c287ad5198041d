"""fp32 for operators whose 16-bit kernels lose accuracy, inside 16-bit models (O2, O3, O5).

Note [Accurate operators]
    A 16-bit model has no op casts. A function mode finds the few functions of
    :data:`apex._core.op_rows.INACCURATE` in the model's first forward passes and, if there was one,
    in all later ones: a mode costs each call of torch some microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from apex._core import op_rows, tree
from apex._core.dtypes import is_low_precision
from apex._core.op_casts import tensors_in
from apex._core.tree import Args, Kwargs
from apex._engine.autocast.region import NoAutocastRegion
from apex._torch.dynamo import traces_function_modes

R = TypeVar("R")

_FORWARDS = 32
"""Forward passes that are searched."""

_log = logging.getLogger("apex")

_is_compiling = torch.compiler.is_compiling


class LowPrecisionRegion(NoAutocastRegion):
    """Runs 16-bit models: without casts of sessions, and with accurate operators.

    See Note [Accurate operators].
    """

    def __init__(self) -> None:
        self._left = _FORWARDS
        self._functions: set[str] = set()

    def run_traced(self, fn: Callable[..., R], args: Args, kwargs: Kwargs) -> R:
        # An export takes a mode for a side effect of the model.
        if not traces_function_modes or torch.compiler.is_exporting():
            return super().run_traced(fn, args, kwargs)
        with _AccurateMode(self._functions):
            return super().run_traced(fn, args, kwargs)

    def enter(self, until: ExitStack, args: Args, kwargs: Kwargs) -> None:
        if self._left > 0 or self._functions:
            self._left -= 1
            until.enter_context(_AccurateMode(self._functions))
        super().enter(until, args, kwargs)


class _AccurateMode(TorchFunctionMode):
    """Runs inaccurate functions on fp32 copies, and rounds the result; notes their names."""

    def __init__(self, noted: set[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in op_rows.INACCURATE:
            return func(*args, **kwargs)
        low = [tensor for tensor in tensors_in(args, kwargs) if is_low_precision(tensor)]
        if not low or low[0].device.type not in op_rows.INACCURATE[name]:
            return func(*args, **kwargs)
        if name not in self._noted and not _is_compiling():
            self._noted.add(name)
            _log.warning(
                "amp: %s runs in fp32 in this 16-bit model: its 16-bit kernel is not accurate.",
                name,
            )
        args, kwargs = tree.cast_arguments(args, kwargs, torch.float32)
        return tree.cast_tensors(func(*args, **kwargs), low[0].dtype)
