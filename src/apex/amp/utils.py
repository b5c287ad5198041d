"""apex's small tensor functions, for old scripts that import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex import _unavailable
from apex._core import dtypes

_RNN = "torch's RNNs, whose weights amp casts directly"
_CASTS = "amp.half_function, amp.float_function or amp.promote_function, which cast arguments"
_REGISTER = "amp.register_half_function(module, name) or another register function"

__getattr__ = _unavailable.names_instead(
    __name__,
    {
        **dict.fromkeys(("as_inplace", "has_func", "get_func"), "getattr and hasattr"),
        **dict.fromkeys(("cached_cast", "casted_args", "should_cache", "verbosify"), _CASTS),
        "collect_fp_tensor_types": "the tensors' dtype attributes",
        "new_synthesize_flattened_rnn_weights": _RNN,
        **dict.fromkeys(("set_func", "set_func_save"), _REGISTER),
        "synthesize_flattened_rnn_weights": _RNN,
    },
)


def is_cuda_enabled() -> bool:
    """Returns whether torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Returns the CUDA version that torch was built for; empty without CUDA."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: object) -> bool:
    """Returns whether ``x`` is a list or tuple."""
    return isinstance(x, list | tuple)


def is_fp_tensor(x: Any) -> bool:
    """Returns whether ``x`` is a floating-point tensor, or a nested list or tuple of such."""
    if isinstance(x, list | tuple):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()


def type_string(x: Tensor) -> str:
    """Returns the last part of the tensor's type name, such as ``"HalfTensor"``."""
    return x.type().split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Casts floating-point tensors, also in lists and tuples, to fp16; keeps anything else."""
    return _cast(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Casts floating-point tensors, also in lists and tuples, to fp32; keeps anything else."""
    return _cast(x, torch.float32)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_cast(item, dtype) for item in x)
    return dtypes.cast(x, dtype) if isinstance(x, Tensor) else x
