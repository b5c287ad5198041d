"""apex's small tensor functions, for old scripts that import them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apex import _unavailable
from apex._core import dtypes, tree

_RNN = "torch's RNNs, whose weights amp casts directly"

__getattr__ = _unavailable.names_instead(
    __name__,
    {
        "new_synthesize_flattened_rnn_weights": _RNN,
        "set_func_save": "amp.register_half_function(module, name) or another register function",
        "synthesize_flattened_rnn_weights": _RNN,
    },
)

Cast = Callable[[Any], Any]


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
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def should_cache(x: Any) -> bool:
    """Returns whether ``x`` is an fp32 parameter, or a nested list or tuple of such."""
    if isinstance(x, list | tuple):
        return all(should_cache(item) for item in x)
    return isinstance(x, nn.Parameter) and x.dtype is torch.float32


def collect_fp_tensor_types(args: Iterable[Any], kwargs: Mapping[str, Any]) -> set[str]:
    """Returns the :func:`type_string` of each floating-point tensor, lists included."""
    floating = [x for x in (*args, *kwargs.values()) if is_fp_tensor(x)]
    return set(map(type_string, tree.tensors(floating)))


def type_string(x: Tensor) -> str:
    """Returns the last part of the tensor's type name, such as ``"HalfTensor"``."""
    return x.type().split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Casts floating-point tensors, also in lists and tuples, to fp16; keeps anything else."""
    del name, verbose
    return _mapped(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Casts floating-point tensors, also in lists and tuples, to fp32; keeps anything else."""
    del name, verbose
    return _mapped(x, torch.float32)


def cached_cast(cast_fn: Cast, x: Any, cache: dict[Any, Any]) -> Any:
    """Returns ``cast_fn(x)``, cached; recomputes it if ``requires_grad`` has changed."""
    if isinstance(x, list | tuple):
        return type(x)(cached_cast(cast_fn, item, cache) for item in x)
    known = cache.get(x)
    if known is None or (torch.is_grad_enabled() and x.requires_grad != known.requires_grad):
        known = cache[x] = cast_fn(x)
    return known


def verbosify(cast_fn: Callable[..., Any], fn_name: str, verbose: bool) -> Callable[..., Any]:
    """Returns ``cast_fn``; with ``verbose``, binds it and the function's name as arguments."""
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def as_inplace(fns: Iterable[str]) -> Iterator[str]:
    """Yields the names of the in-place variants of operators."""
    return (f"{name}_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    """Returns whether a module, class or dict has ``fn``."""
    return fn in (mod if isinstance(mod, dict) else dir(mod))


def get_func(mod: Any, fn: str) -> Any:
    """Returns ``fn`` of a module, class or dict."""
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    """Sets ``fn`` of a module, class or dict."""
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def casted_args(cast_fn: Cast, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns ``args`` with ``cast_fn`` applied to the floating-point ones; ignores ``kwargs``."""
    del kwargs
    return [cast_fn(arg) if is_fp_tensor(arg) else arg for arg in args]


def _mapped(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, dtype) for item in value)
    return dtypes.cast(value, dtype) if isinstance(value, Tensor) else value
