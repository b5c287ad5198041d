"""Small questions about tensors under apex's names, which old scripts import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from apex._core import dtypes

Cast = Callable[[Any], Any]


def is_cuda_enabled() -> bool:
    """Returns whether torch is built for CUDA."""
    return torch.version.cuda is not None


def is_nested(value: object) -> bool:
    """Returns whether ``value`` is a list or tuple."""
    return isinstance(value, list | tuple)


def is_fp_tensor(value: Any) -> bool:
    """Returns whether ``value`` is a floating tensor, or a list or tuple of nothing else."""
    if isinstance(value, list | tuple):
        return all(is_fp_tensor(item) for item in value)
    return isinstance(value, Tensor) and value.is_floating_point()


def type_string(tensor: Tensor) -> str:
    """Returns the last word of the tensor's type, such as ``"HalfTensor"``."""
    return tensor.type().split(".")[-1]


def maybe_half(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Returns floating tensors in fp16, also in lists and tuples; anything else as it is."""
    del name, verbose
    return _mapped(value, torch.float16)


def maybe_float(value: Any, name: str = "", verbose: bool = False) -> Any:
    """Returns floating tensors in fp32, also in lists and tuples; anything else as it is."""
    del name, verbose
    return _mapped(value, torch.float32)


def casted_args(cast_fn: Cast, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns ``args`` with ``cast_fn`` applied to the floating ones; ``kwargs`` stay."""
    del kwargs
    return [cast_fn(arg) if is_fp_tensor(arg) else arg for arg in args]


def _mapped(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, dtype) for item in value)
    return dtypes.cast(value, dtype) if isinstance(value, Tensor) else value
