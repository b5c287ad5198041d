"""Pure functions that cast one operator's arguments by the category of its row.

Operators take tensors, numbers and lists of them. The walk of :mod:`.tree` through any container
would take 5 us more in each call of our kernels, which take some 15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.tree import Args, Kwargs


class InPlaceError(NotImplementedError, TypeError):
    """A low-precision tensor cannot hold the fp32 result of an in-place operation.

    Also a TypeError: with that, ``Tensor.__ipow__`` lets Python take ``x = x ** 2`` for ``x **= 2``
    and ``x`` becomes an fp32 tensor, as under apex.
    """


def cast_operands(
    op: str,
    category: str | None,
    args: Args,
    kwargs: Kwargs,
    low: torch.dtype,
    dtypes: frozenset[torch.dtype],
    cast: Callable[[Tensor, torch.dtype], Tensor],
) -> tuple[Iterable[Any], Kwargs]:
    """Returns the arguments of one call, cast by a category.

    Casts float64 only beside other dtypes, such as data from numpy beside weights.

    Args:
        op: The operator, for messages.
        category: The category of the operator's row, or ``"raises"``. None and other categories
            cast nothing.
        args: The positional arguments.
        kwargs: The keyword arguments.
        low: The region's low precision.
        dtypes: The arguments' dtypes, as in :func:`floating_dtypes`.
        cast: Casts one tensor, as :func:`to_dtype`.
    """
    dtype: torch.dtype | None = None
    match category:
        case "low_precision" | "recurrent":
            dtype = low
        case "fp32":
            dtype = torch.float32
        case "banned":
            _refuse_fp16(op, dtypes)
            dtype = torch.float32
        case "promote":
            dtype = widest(dtypes)
        case "destination":
            result: Tensor = kwargs["out"] if "out" in kwargs else args[0]
            dtype = result.dtype
        case "fp32_inplace":
            if args[0].dtype in LOW_PRECISION:
                operator = op.partition(".")[0]
                raise InPlaceError(
                    f"In-place {operator} got a {args[0].dtype} tensor under amp: this operation "
                    "runs in fp32, and the tensor cannot hold the result. Use "
                    f"{operator.rstrip('_')}, which returns a new fp32 tensor, or put the call "
                    "inside `with amp.disable_casts():`."
                )
        case "raises":
            raise RuntimeError(f"{op} is unsafe to autocast. Call {op}_with_logits.")
    if dtype not in CASTABLE or dtypes in ({dtype}, {torch.float64}):
        return args, kwargs
    cast_kwargs = {key: _cast(value, dtype, cast) for key, value in kwargs.items()}
    return _cast(args, dtype, cast), cast_kwargs


def _refuse_fp16(op: str, dtypes: frozenset[torch.dtype]) -> None:
    if torch.float16 in dtypes:
        raise NotImplementedError(
            f"{op} got a float16 tensor under amp. It cannot resolve probabilities near 0 and 1, "
            f"so the loss can become inf or NaN. Call {op}_with_logits (as a module: "
            "torch.nn.BCEWithLogitsLoss) on the values before the sigmoid, which is stable in "
            "any precision; pass fp32 tensors (.float()); or run it in fp32 through "
            "amp.init(allow_banned=True) or "
            f"amp.register_float_function(torch.nn.functional, {op!r})."
        )


def tensors_in(args: Iterable[Any], kwargs: Kwargs) -> list[Tensor]:
    """Returns the tensors among a call's arguments, lists included."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value, {})
    return tensors


def floating_dtypes(tensors: Iterable[Tensor]) -> frozenset[torch.dtype]:
    """Returns the castable dtypes of tensors."""
    # No method of a frozenset: torch 2.6 cannot guard it in compiled code.
    return frozenset([tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE])


def widest(dtypes: Collection[torch.dtype]) -> torch.dtype | None:
    """Returns the widest of several castable dtypes; None for a single one."""
    if len(dtypes) < 2:
        return None
    # torch.promote_types is an operator, which a dispatch mode (selective checkpoint's) would see.
    return torch.float64 if torch.float64 in dtypes else torch.float32


_TO = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}
"""Methods that cast to a dtype, 1 us faster than ``Tensor.to``."""


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` in a castable dtype."""
    return _TO[dtype](tensor)


def _cast(value: Any, dtype: torch.dtype, cast: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    """Returns ``value`` with castable tensors, lists included, in ``dtype``."""
    if isinstance(value, Tensor):
        if value.dtype is dtype or value.dtype not in CASTABLE:
            return value
        return cast(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, cast) for item in value]
    return value
