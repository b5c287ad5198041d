"""Pure functions that cast one operator's arguments by the category of its row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION, name

Args = Sequence[Any]
Kwargs = dict[str, Any]

CastRule = Callable[[Args, Kwargs, torch.dtype, torch.dtype | None], tuple[Args, Kwargs]]
"""Returns the cast arguments of one call.

The dtypes are the region's low precision and the widest one of mixed arguments, as in ``widest``.
"""


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
        "fp32_beside_float64": _double_to_fp32,
        "destination": _all_to_result,
        "banned": functools.partial(_refuse_dtypes, op, (torch.float16,)),
        "banned_16bit": functools.partial(_refuse_dtypes, op, LOW_PRECISION),
        "fp32_inplace": functools.partial(_refuse_low_self, op),
        "raises": functools.partial(_refuse, op),
    }


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the tensors among a call's arguments, lists included."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value, {})
    return tensors


def widest(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Returns the widest castable dtype among tensors; None unless there are several."""
    dtypes = CASTABLE.intersection([tensor.dtype for tensor in tensors])
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
"""What casts: 1 us faster than ``Tensor.to``."""


def _cast(value: Any, dtype: torch.dtype, from_dtypes: Collection[torch.dtype]) -> Any:
    """Returns ``value`` with tensors of certain dtypes, lists included, in ``dtype``."""
    if isinstance(value, Tensor):
        return _TO[dtype](value) if value.dtype in from_dtypes else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, from_dtypes) for item in value]
    return value


def _cast_all(
    args: Args, kwargs: Kwargs, dtype: torch.dtype, from_dtypes: Collection[torch.dtype] = CASTABLE
) -> tuple[Args, Kwargs]:
    if kwargs:
        kwargs = {key: _cast(value, dtype, from_dtypes) for key, value in kwargs.items()}
    return [_cast(value, dtype, from_dtypes) for value in args], kwargs


_NOT_DOUBLE = CASTABLE - {torch.float64}
_NOT_SINGLE = CASTABLE - {torch.float32}


def _all_to_low(
    args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    """Casts to 16 bits; float64 only beside other dtypes, as data from numpy meets weights."""
    from_dtypes = CASTABLE if wide is torch.float64 else _NOT_DOUBLE
    return _cast_all(args, kwargs, low, from_dtypes)


def _all_to_fp32(
    args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    """Casts to fp32; float64 only beside other dtypes."""
    from_dtypes = _NOT_SINGLE if wide is torch.float64 else LOW_PRECISION
    return _cast_all(args, kwargs, torch.float32, from_dtypes)


def _double_to_fp32(
    args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    return (args, kwargs) if wide is not torch.float64 else _all_to_fp32(args, kwargs, low, wide)


def _all_to_result(
    args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    result: Tensor = kwargs["out"] if "out" in kwargs else args[0]
    if result.dtype not in CASTABLE:
        return args, kwargs
    return _cast_all(args, kwargs, result.dtype)


def _all_to_widest(
    args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    return (args, kwargs) if wide is None else _cast_all(args, kwargs, wide)


def _ask_for_fp32(
    by_position: bool, args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    asked = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if asked or args[0].dtype not in LOW_PRECISION:
        return args, kwargs
    return (args[:2] if by_position else args), {**kwargs, "dtype": torch.float32}


def _refuse_dtypes(
    op: str,
    dtypes: Collection[torch.dtype],
    args: Args,
    kwargs: Kwargs,
    low: torch.dtype,
    wide: torch.dtype | None,
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
    return _all_to_fp32(args, kwargs, low, wide)


def _refuse_low_self(
    op: str, args: Args, kwargs: Kwargs, low: torch.dtype, wide: torch.dtype | None
) -> tuple[Args, Kwargs]:
    if args[0].dtype in LOW_PRECISION:
        operator = op.partition(".")[0]
        raise InPlaceError(
            f"In-place {operator} got a {args[0].dtype} tensor under amp: this operation runs in "
            f"fp32, and the tensor cannot hold the result. Use {operator.rstrip('_')}, which "
            "returns a new fp32 tensor, or put the call inside `with amp.disable_casts():`."
        )
    return args, kwargs


def _refuse(op: str, *call: object) -> tuple[Args, Kwargs]:
    raise RuntimeError(f"{op} is unsafe to autocast. Call {op}_with_logits.")
