"""Autocast kernels, which cast an operator's arguments by its row in a live session's table.

Note [Kernels stay]
    torch's autocast state is the only state. Kernels are registered once per process, and only for
    autocast's dispatch keys. Each kernel looks up the newest live session whose dtype is
    autocast's. Without such a session, it does what torch's own kernel does.

Note [Casts of our own]
    Our kernels do not call torch's autocast kernels, even where these would cast alike. Python can
    call them only with the GIL held (``torch.library.get_kernel``), and they lock autocast's weight
    cache. Another thread that holds the lock may need the GIL to release a tensor that Python
    refers to, which is a deadlock. Calls and redispatches of operators release the GIL.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import op_rows
from apex._core.op_casts import cast_operands, floating_dtypes, tensors_in
from apex._core.op_table import AutocastSpec, OpTable
from apex._engine.autocast.ambient import newest
from apex._engine.autocast.weights import shared
from apex._torch import dispatcher, dynamo
from apex._torch.autograd import autocast_depth, backward_id, is_formula
from apex._torch.dispatcher import AUTOCAST_KEYS

_PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that no compiler traces."""

_MODULES = (__name__, dynamo.__name__, "torch._ops")
"""Modules whose functions are between the caller of an operator and :func:`_is_left_alone`."""

_registered = set[tuple[str, str]]()
"""Device type and operator of each of our kernels."""

_lock = threading.Lock()


def register_rows(spec: AutocastSpec) -> None:
    """Registers the kernels that the rows of ``spec`` need beside torch's.

    Raises:
        ValueError: If a device type of the spec has no autocast known to us.
    """
    for device in spec.device_types:
        if device not in AUTOCAST_KEYS:
            raise ValueError(
                f"Op casts (O1, O4) got a model on {device}; they work on "
                f"{', '.join(AUTOCAST_KEYS)}. Use a level without op casts (O0, O2, O3, O5) there."
            )
    for device in spec.device_types:
        register(device, _not_as_in_torch(spec.table, device))


def register(device: str, ops: Iterable[str]) -> None:
    """Registers our kernels of some operators for a device type, permanently."""
    with _lock:
        for op in ops:
            if (device, op) not in _registered:
                kernel = _build(op, device)
                dispatcher.register(op, kernel, AUTOCAST_KEYS[device])
                _registered.add((device, op))


def _not_as_in_torch(table: OpTable, device: str) -> Iterator[str]:
    """Yields operators that need our kernel, because torch casts differently than the table."""
    default = OpTable.default().rows
    differences = op_rows.NATIVE_DIFFERENCES[device]
    for op in {*default, *table.rows, *differences}:
        native = native_category(op, device)
        if native is None and op in op_rows.COVERED_INSIDE:
            native = default[op]
        is_changed = table.rows.get(op) != native
        if is_changed or op in op_rows.SPARSE_OPERANDS:
            yield op


@functools.cache  # the first call comes before our kernel of the operator
def native_category(op: str, device: str) -> str | None:
    """Returns the category of torch's own autocast for an operator; None if it has no kernel.

    Raises:
        RuntimeError: If Python code has registered a kernel.
    """
    key = AUTOCAST_KEYS[device]
    if f"aten/{op}/{key}" in dispatcher.python_kernels:
        raise RuntimeError(
            f"Op casts (O1, O4) cannot register their kernel of {op}: Python code has. A process "
            "can import apex once only, even if sys.modules has lost it. Restart Python, or use a "
            "level without op casts (O0, O2, O3, O5)."
        )
    if not dispatcher.has_kernel(f"aten::{op}", key):
        return None
    usual = OpTable.default().rows.get(op)
    return op_rows.NATIVE_DIFFERENCES[device].get(op, usual)


def _build(op: str, device: str) -> Callable[..., Any]:
    """Returns the kernel of one operator for the autocast key of a device type."""
    operator = dispatcher.overload(op)
    below = dispatcher.keys_below_autocast(device)
    native = native_category(op, device)
    types = [str(argument.type) for argument in operator._schema.arguments]
    takes_number = types[:2] == ["Tensor", "Tensor"]  # as the second one, in x.add(1.0)
    has_cudnn = device == "cuda" and torch.version.hip is None

    @dynamo.untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype(device)
        spec = newest(device, low)
        if type(args[0]) not in _PLAIN:
            dynamo.recompile_on_change(newest, device, low)
        if op in op_rows.COMPARISONS:
            left, right, *others = args
            args = (_as_tensor(left), _as_tensor(right), *others)
        tensors = tensors_in(args, kwargs)
        dtypes = floating_dtypes(tensors)
        if spec is None:  # autocast of the script's own
            category = native
        elif len(dtypes) < 2 and backward_id() != -1 and _is_left_alone():
            category = None
        else:
            category = spec.table.rows.get(op)
            if category == "low_precision" and any(t.layout is not torch.strided for t in tensors):
                category = "fp32"  # torch lacks 16-bit kernels of sparse products
            elif category == "fp32_inplace" and not dispatcher.is_above_autograd(keyset, args[0]):
                category = None  # torch's own kernels work in place on memory of their own
            elif category == "recurrent" and has_cudnn and low is torch.float16:
                category = None  # cuDNN's inner row casts the weights into one piece, to fp16 only
        is_number = takes_number and not isinstance(args[1], Tensor)
        if category in (None, "refuses") and not is_number:  # a redispatch accepts no number
            # Operators inside this one still have casts.
            return operator.redispatch(keyset & below, *args, **kwargs)
        cast_args, cast_kwargs = cast_operands(op, category, args, kwargs, low, dtypes, shared.cast)
        torch.set_autocast_enabled(device, False)
        try:
            return operator(*cast_args, **cast_kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    return kernel


def _is_left_alone() -> bool:
    """Returns whether a one-dtype call in a backward pass outside ``scale_loss`` is not cast.

    Such a call comes from autograd's formulas, or from Python code with gradients disabled. Code
    that enables gradients runs a forward pass again; torch's recomputes run in an autocast block.
    """
    if autocast_depth() > 0:
        return False
    return not torch.is_grad_enabled() or is_formula(called_in=_MODULES)


def _as_tensor(constant: Any) -> Tensor:
    """Returns an operand of a comparison as a tensor: TorchScript also compares numbers."""
    if isinstance(constant, Tensor):
        return constant
    dtype = torch.float64 if isinstance(constant, float) else None
    return torch.tensor(constant, dtype=dtype, device="cpu")
