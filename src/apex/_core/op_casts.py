"""Pure functions that cast one operator's arguments by the category of its row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.op_table import Category

Args = Sequence[Any]
Kwargs = dict[str, Any]

CastRule = Callable[[Args, Kwargs, torch.dtype], tuple[Args, Kwargs]]
"""Returns the cast arguments of one call; the dtype is the region's low precision."""

# The named methods take 1.4 us where Tensor.to(dtype) takes 2.4 us (torch 2.13, CPU).
_METHOD: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}


class InPlaceError(NotImplementedError, TypeError):
    """A low-precision tensor cannot hold the fp32 result of an in-place operation.

    A TypeError, too: with that, ``Tensor.__ipow__`` lets Python take ``x = x ** 2`` for ``x **= 2``
    and ``x`` becomes an fp32 tensor, as under apex.
    """


def rules_for(op: str, schema: torch.FunctionSchema) -> Mapping[Category, CastRule]:
    """Returns the cast rule for each category of one operator, such as ``"pow.Scalar"``.

    If the operator has a ``dtype`` parameter, the ``fp32`` rule requests an fp32 result instead of
    casting the input, which saves a pass over the data. It keeps a ``dtype`` from the caller.
    """
    refusals: dict[Category, CastRule] = {
        "banned": functools.partial(_refuse_fp16, op),
        "fp32_inplace": functools.partial(_refuse_low_self, op),
    }
    takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
    # Matrix norms raise on low-precision input, whatever their dtype argument.
    if takes_dtype and schema.name != "aten::linalg_matrix_norm":
        # Only the softmaxes take the dtype by position, as third; the rule drops it if it is None.
        by_position = op in {"softmax.int", "log_softmax.int"}
        refusals["fp32"] = functools.partial(_ask_for_fp32, by_position)
    return {**_RULES, **refusals}


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """Returns ``value`` with castable tensors, lists included, in ``dtype``."""
    if isinstance(value, Tensor):
        given = value.dtype
        return _METHOD[dtype](value) if given is not dtype and given in CASTABLE else value
    if isinstance(value, (list, tuple)):
        return [cast_to(item, dtype) for item in value]
    return value


def cast_to_fp32(value: Any) -> Any:
    """Returns ``value`` with fp16 and bf16 tensors, lists included, in fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW_PRECISION else value
    if isinstance(value, (list, tuple)):
        return [cast_to_fp32(item) for item in value]
    return value


def widest(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Returns the widest castable dtype among a call's tensors; None unless there are several."""
    found: set[torch.dtype] = set()
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            found.update(item.dtype for item in value if isinstance(item, Tensor))
    found &= CASTABLE
    if len(found) < 2:
        return None
    # torch.promote_types is an operator, which a dispatch mode (selective checkpoint's) would see.
    return torch.float64 if torch.float64 in found else torch.float32


def has_double(values: Args) -> bool:
    """Returns whether any tensor in ``values``, lists included, is float64."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is torch.float64:
                return True
        elif isinstance(value, (list, tuple)) and has_double(value):
            return True
    return False


def has_sparse(values: Args) -> bool:
    """Returns whether any tensor in ``values``, lists included, has a sparse layout."""
    return any(
        value.layout is not torch.strided
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and has_sparse(value)
        for value in values
    )


def _all_to(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[Args, Kwargs]:
    if kwargs:
        kwargs = {name: cast_to(value, dtype) for name, value in kwargs.items()}
    return [cast_to(value, dtype) for value in args], kwargs


def _all_to_fp32(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    if kwargs:
        kwargs = {name: cast_to_fp32(value) for name, value in kwargs.items()}
    # Most arguments are numbers or None, for which this test costs less than a call.
    return [cast_to_fp32(arg) if isinstance(arg, (Tensor, list)) else arg for arg in args], kwargs


def _all_to_result(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    result: Tensor = kwargs["out"] if "out" in kwargs else args[0]
    own = result.dtype
    return _all_to(args, kwargs, own) if own in CASTABLE else (args, kwargs)


def _all_to_widest(args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    wide = widest(args, kwargs)
    return (args, kwargs) if wide is None else _all_to(args, kwargs, wide)


def _ask_for_fp32(
    by_position: bool, args: Args, kwargs: Kwargs, low: torch.dtype
) -> tuple[Args, Kwargs]:
    asked = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if asked or args[0].dtype not in LOW_PRECISION:
        return args, kwargs
    return (args[:2] if by_position else args), {**kwargs, "dtype": torch.float32}


def _refuse_fp16(op: str, args: Args, kwargs: Kwargs, low: torch.dtype) -> tuple[Args, Kwargs]:
    if any(isinstance(arg, Tensor) and arg.dtype is torch.float16 for arg in args):
        raise NotImplementedError(
            f"{op} got a float16 tensor under amp: float16 cannot resolve probabilities near 0 and "
            f"1, so the loss can become inf or NaN. Call {op}_with_logits (as a module: "
            "torch.nn.BCEWithLogitsLoss) on the values before the sigmoid, which is stable in any "
            "precision; pass fp32 tensors (.float()); or run it in fp32 through "
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


_RULES: dict[Category, CastRule] = {
    "low_precision": _all_to,
    "destination": _all_to_result,
    "recurrent": _all_to,
    "fp32": _all_to_fp32,
    "promote": _all_to_widest,
}
