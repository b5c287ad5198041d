"""Pure functions that cast one operator's arguments by the category of its row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION, name

Args = Sequence[Any]
Kwargs = dict[str, Any]

CastRule = Callable[[Args, Kwargs, torch.dtype], tuple[Args, Kwargs]]
"""Returns the cast arguments of one call; the dtype is the region's low precision."""


class InPlaceError(NotImplementedError, TypeError):
    """A low-precision tensor cannot hold the fp32 result of an in-place operation.

    A TypeError, too: with that, ``Tensor.__ipow__`` lets Python take ``x = x ** 2`` for ``x **= 2``
    and ``x`` becomes an fp32 tensor, as under apex.
    """


def rules_for(op: str, schema: torch.FunctionSchema) -> Mapping[str | None, CastRule]:
    """Returns the cast rule for each category of one operator, such as ``"pow.Scalar"``.

    If the operator has a ``dtype`` parameter, the ``fp32`` rule requests an fp32 result instead of
    casting the input, which saves a pass over the data. It keeps a ``dtype`` from the caller.
    """
    fp32: CastRule = _all_to_fp32
    takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
    # Matrix norms raise on low-precision input, whatever their dtype argument.
    if takes_dtype and schema.name != "aten::linalg_matrix_norm":
        # Only the softmaxes take the dtype by position, as third; the rule drops it if it is None.
        fp32 = functools.partial(_ask_for_fp32, op in {"softmax.int", "log_softmax.int"})
    return {
        "low_precision": _all_to_low,
        "recurrent": _all_to_low,
        "fp32": fp32,
        "promote": _all_to_widest,
        "destination": _all_to_result,
        "banned": functools.partial(_refuse_dtypes, op, (torch.float16,)),
        "banned_16bit": functools.partial(_refuse_dtypes, op, LOW_PRECISION),
        "fp32_inplace": functools.partial(_refuse_low_self, op),
        "raises": functools.partial(_refuse, op),
    }


def widest(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Returns the widest castable dtype among a call's tensors; None unless there are several."""
    found = {tensor.dtype for tensor in _tensors((*args, *kwargs.values()))} & CASTABLE
    if len(found) < 2:
        return None
    # torch.promote_types is an operator, which a dispatch mode (selective checkpoint's) would see.
    return torch.float64 if torch.float64 in found else torch.float32


def has_sparse(args: Args) -> bool:
    """Returns whether any tensor in ``args``, lists included, has a sparse layout."""
    return any(tensor.layout is not torch.strided for tensor in _tensors(args))


def _tensors(values: Args) -> list[Tensor]:
    found = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


_TO = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}
"""What casts: 1 us faster than ``Tensor.to``."""


def _cast(value: Any, dtype: torch.dtype, given: Collection[torch.dtype]) -> Any:
    """Returns ``value`` with tensors of the ``given`` dtypes, lists included, in ``dtype``."""
    if isinstance(value, Tensor):
        return _TO[dtype](value) if value.dtype in given else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, given) for item in value]
    return value


def _cast_all(
    args: Args, kwargs: Kwargs, dtype: torch.dtype, given: Collection[torch.dtype] = CASTABLE
) -> tuple[Args, Kwargs]:
    if kwargs:
        kwargs = {name: _cast(value, dtype, given) for name, value in kwargs.items()}
    return [_cast(value, dtype, given) for value in args], kwargs


_NOT_DOUBLE = CASTABLE - {torch.float64}


def _all_to_low(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    return _cast_all(args, kwargs, low, _NOT_DOUBLE)


def _all_to_fp32(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    return _cast_all(args, kwargs, torch.float32, LOW_PRECISION)


def _all_to_result(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    result: Tensor = kwargs["out"] if "out" in kwargs else args[0]
    own = result.dtype
    return _cast_all(args, kwargs, own) if own in CASTABLE else (args, kwargs)


def _all_to_widest(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    wide = widest(args, kwargs)
    return (args, kwargs) if wide is None else _cast_all(args, kwargs, wide)


def _ask_for_fp32(
    by_position: bool, args: Args, kwargs: Kwargs, low: torch.dtype
) -> tuple[Args, Kwargs]:
    asked = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if asked or args[0].dtype not in LOW_PRECISION:
        return args, kwargs
    return (args[:2] if by_position else args), {**kwargs, "dtype": torch.float32}


def _refuse_dtypes(
    op: str, dtypes: Collection[torch.dtype], args: Args, kwargs: Kwargs, low: torch.dtype
) -> tuple[Args, Kwargs]:
    for arg in args:
        if isinstance(arg, Tensor) and arg.dtype in dtypes:
            dtype = name(arg.dtype)
            raise NotImplementedError(
                f"{op} got a {dtype} tensor under amp: {dtype} cannot resolve probabilities near 0 "
                f"and 1, so the loss can become inf or NaN. Call {op}_with_logits (as a module: "
                "torch.nn.BCEWithLogitsLoss) on the values before the sigmoid, which is stable in "
                "any precision; pass fp32 tensors (.float()); or run it in fp32 through "
                "amp.init(allow_banned=True) or "
                f"amp.register_float_function(torch.nn.functional, {op!r})."
            )
    return _all_to_fp32(args, kwargs, low)


def _refuse_low_self(op: str, args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    if args[0].dtype in LOW_PRECISION:
        name = op.partition(".")[0]
        raise InPlaceError(
            f"In-place {name} got a {args[0].dtype} tensor under amp: this operation runs in fp32, "
            f"and the tensor cannot hold the result. Use {name.rstrip('_')}, which returns a new "
            "fp32 tensor, or put the call inside `with amp.disable_casts():`."
        )
    return args, kwargs


def _refuse(op: str, args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    raise RuntimeError(f"{op} is unsafe to autocast. Call {op}_with_logits.")
