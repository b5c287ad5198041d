"""How one operator's arguments are cast, by the category of its row: pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.op_table import CastSpec, Category
from apex._torch.autograd import backward_id

Args = Sequence[Any]
Kwargs = dict[str, Any]

CastRule = Callable[[str, CastSpec, str, Args, Kwargs], tuple[Args, Kwargs]]
"""Returns the arguments of one call, cast: operator, spec, device type, args, kwargs."""

# The named methods take 1.4 us where Tensor.to(dtype) takes 2.4 us (torch 2.13, CPU).
_METHOD: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}


def rules_for(schema: torch.FunctionSchema) -> Mapping[Category, CastRule]:
    """Returns the rule of every category for one operator.

    An operator with a ``dtype`` parameter is asked for an fp32 result instead of getting fp32
    input: one pass less over the data, and the caller's ``dtype`` is honoured.
    """
    takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
    # Matrix norms refuse low-precision input whatever dtype they are asked for.
    if takes_dtype and schema.name != "aten::linalg_matrix_norm":
        return {**_RULES, "fp32": _result_fp32}
    return _RULES


def lowered(value: Any, dtype: torch.dtype) -> Any:
    """Returns ``value`` with every castable tensor in it (one list deep) in ``dtype``."""
    if isinstance(value, Tensor):
        given = value.dtype
        return _METHOD[dtype](value) if given is not dtype and given in CASTABLE else value
    if isinstance(value, (list, tuple)):
        return [lowered(item, dtype) for item in value]
    return value


def raised(value: Any) -> Any:
    """Returns ``value`` with every fp16 and bf16 tensor in it (one list deep) in fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW_PRECISION else value
    if isinstance(value, (list, tuple)):
        return [raised(item) for item in value]
    return value


def widest(values: Args) -> torch.dtype | None:
    """Returns the widest floating dtype among the tensors in ``values``; None below two dtypes."""
    found: set[torch.dtype] = set()
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor) and item.dtype in CASTABLE:
                found.add(item.dtype)
    return functools.reduce(torch.promote_types, found) if len(found) > 1 else None


def has_double(values: Args) -> bool:
    """Returns whether any tensor in ``values`` (one list deep) is float64."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is torch.float64:
                return True
        elif isinstance(value, (list, tuple)) and has_double(value):
            return True
    return False


def _all_lowered(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[Args, Kwargs]:
    if kwargs:
        kwargs = {name: lowered(value, dtype) for name, value in kwargs.items()}
    return [lowered(value, dtype) for value in args], kwargs


def _to_low(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    # The device's dtype rather than the spec's: a user may have nested torch.autocast with another.
    return _all_lowered(args, kwargs, torch.get_autocast_dtype(device))


def _to_fp32(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    if kwargs:
        kwargs = {name: raised(value) for name, value in kwargs.items()}
    # Plain numbers and None are most of the arguments: a call each would cost more than the test.
    return [raised(arg) if isinstance(arg, (Tensor, list)) else arg for arg in args], kwargs


def _result_fp32(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    asked = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if asked or args[0].dtype not in LOW_PRECISION:
        return args, kwargs
    # Only the softmaxes take the dtype by position, as third: here it can only be None.
    by_position = op in {"softmax.int", "log_softmax.int"}
    return (args[:2] if by_position else args), {**kwargs, "dtype": torch.float32}


def _to_widest(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    wide = widest([*args, *kwargs.values()])
    return (args, kwargs) if wide is None else _all_lowered(args, kwargs, wide)


def _banned(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    half = any(isinstance(arg, Tensor) and arg.dtype is torch.float16 for arg in args)
    if half and not spec.allow_banned:
        raise NotImplementedError(
            f"{op} got a float16 tensor under amp: float16 cannot hold the logarithms near 0 and "
            f"1, and the loss becomes inf or NaN. Call {op}_with_logits (for a module: "
            "torch.nn.BCEWithLogitsLoss) on the values before the sigmoid, which is stable in any "
            "precision; or pass fp32 tensors (.float()); or let it run in fp32 by "
            "amp.init(allow_banned=True) or "
            f"amp.register_float_function(torch.nn.functional, {op!r})."
        )
    return _to_fp32(op, spec, device, args, kwargs)


def _in_place(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    # In a backward pass autograd's own formulas may use the operator: there is nobody to tell.
    if args[0].dtype in LOW_PRECISION and backward_id() == -1:
        name = op.partition(".")[0]
        raise NotImplementedError(
            f"In-place {name} got a {args[0].dtype} tensor under amp: this operation runs in fp32, "
            f"and the tensor cannot hold the result. Use {name.rstrip('_')}, which returns a new "
            "fp32 tensor, or put the call inside `with amp.disable_casts():`."
        )
    return args, kwargs


def _to_cpu(
    op: str, spec: CastSpec, device: str, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    # Tensor.cpu() arrives with the tensor's own dtype, without non_blocking and copy; so does
    # .to("cpu"). Module.cpu() moves its parameters by the same operator: those stay as they are.
    tensor = args[0]
    if (
        tensor.dtype in LOW_PRECISION
        and kwargs.get("dtype") is tensor.dtype
        and kwargs["device"].type == "cpu"
        and not kwargs.keys() & {"non_blocking", "copy"}
        and not isinstance(tensor, (nn.Parameter, nn.Buffer))
    ):
        return args, {**kwargs, "dtype": torch.float32}
    return args, kwargs


_RULES: dict[Category, CastRule] = {
    "low_precision": _to_low,
    "recurrent": _to_low,
    "fp32": _to_fp32,
    "promote": _to_widest,
    "banned": _banned,
    "fp32_inplace": _in_place,
    "to_cpu": _to_cpu,
}
