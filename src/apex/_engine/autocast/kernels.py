"""One operator's autocast kernel, and which operators need one on a device type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from apex._core.op_casts import has_double, rules_for, widest
from apex._core.op_table import (
    COVERED_INSIDE,
    DEVICE_LIMITS,
    NATIVE_DIFFERENCES,
    CastSpec,
    OpTable,
)
from apex._torch import dispatcher
from apex._torch.autograd import backward_id
from apex._torch.dynamo import untraced

Kernel = Callable[..., Any]

BACKWARD_BEGINS = "ones_like"
"""``loss.backward()`` makes its first gradient with it, in the thread that calls."""

_get_dtype, _is_on = torch.get_autocast_dtype, torch.is_autocast_enabled


class ThreadRules(Protocol):
    """What a kernel asks about the thread that calls it."""

    def spec(self, device: str) -> CastSpec | None:
        """Returns whose table holds on a device type; None where no session lives on it."""

    def in_formulas(self) -> bool:
        """Returns whether autograd's own formulas may be what calls."""

    def casts_double(self) -> bool:
        """Returns whether low-precision operators cast float64, too."""

    def backward_begins(self) -> None:
        """Takes note that a backward pass is about to begin with casts on."""


class Group(NamedTuple):
    """Operators of one device type whose kernels come and go together."""

    device: str
    ops: tuple[str, ...]


class Coverage:
    """What torch's own autocast covers on one device type; read before any kernel of ours is there.

    Attributes:
        native: torch's own kernels, by operator of the default table.
        probe: What tells that a backward pass begins.
    """

    def __init__(self, device: str) -> None:
        self.native: dict[str, Any] = {}
        self._device = device
        filled: list[str] = []
        for op in OpTable.default().rows:
            if not dispatcher.has_operator(f"aten::{op}"):
                continue  # an operator of another torch release
            kernel = dispatcher.autocast_kernel(op, device)
            if kernel is not None:
                self.native[op] = kernel
            if _needs_kernel(op, device, kernel is not None):
                filled.append(op)
        self._base = Group(device, tuple(filled))
        self.probe = Group(device, (BACKWARD_BEGINS,))

    def groups(self, table: OpTable) -> Iterator[Group]:
        """Yields what a table needs: the rows that torch lacks, and each row that the user changed.

        The first is the same for every table: its kernels read the row that holds at the call.
        """
        yield self._base
        default = OpTable.default().rows
        for op in sorted({*default, *table.rows}):
            if table.rows.get(op) != default.get(op) and op not in self._base.ops:
                yield Group(self._device, (op,))

    def native_groups(self) -> list[Group]:
        """Returns the operators left to torch's own kernels, each a group.

        Without those that promote: torch's do what ours would, everywhere.
        """
        rows = OpTable.default().rows
        left = (op for op in self.native if rows[op] != "promote" and op not in self._base.ops)
        return [Group(self._device, (op,)) for op in left]

    def kernels(self, group: Group, rules: ThreadRules) -> dict[str, Kernel]:
        """Returns a kernel for each operator of a group."""
        return {op: _build(op, self._device, rules, self.native.get(op)) for op in group.ops}


def _build(op: str, device: str, rules: ThreadRules, native: Any) -> Kernel:
    if op == BACKWARD_BEGINS:
        return _probe(op, device, rules)
    return build_kernel(op, device, rules, native)


def build_kernel(op: str, device: str, rules: ThreadRules, native: Any) -> Kernel:
    """Returns the kernel of one operator for the autocast key of a device type.

    It casts by the operator's row in the spec of the calling thread, or leaves that to torch's own
    kernel where that follows the table. Without a spec it does what torch does without it. In a
    backward pass it casts mixed dtypes only; see Note [Casts in a backward pass].

    Args:
        op: Operator and overload, such as ``"pow.Scalar"``.
        device: Device type.
        rules: Asked about the calling thread.
        native: torch's own autocast kernel, or None where it has none.
    """
    redispatch, call = dispatcher.overload(op).redispatch, dispatcher.direct_call(op)
    cudnn = device == "cuda" and torch.version.hip is None
    cast_rules = rules_for(op, dispatcher.schema(op))
    default = OpTable.default().rows.get(op)
    limit = DEVICE_LIMITS.get(device, {}).get(op)
    follows = native is not None and op not in NATIVE_DIFFERENCES[device]
    key, below = dispatcher.autocast_key(device), dispatcher.keys_below_autocast(device)
    exclude = dispatcher.exclude_key

    @untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        spec = rules.spec(device)
        category = None if spec is None else spec.table.rows.get(op)
        formulas = backward_id() != -1 and rules.in_formulas()
        if follows and category == default and not formulas:
            if not (has_double(args) and rules.casts_double()):
                return native.call_boxed(keyset, *args, **kwargs)
        elif spec is None and native is not None and _is_on(device):
            return native.call_boxed(keyset, *args, **kwargs)
        if spec is None or category is None or (formulas and widest(args, kwargs) is None):
            # Only this call goes below autocast: the inner operators of a composite meet it still.
            return redispatch(keyset & below, *args, **kwargs)
        if category == "low_precision" and has_double(args) and not rules.casts_double():
            return redispatch(keyset & below, *args, **kwargs)
        # autograd's device threads have torch's own default.
        low = spec.dtype if formulas else _get_dtype(device)
        if category == "recurrent" and cudnn and low is torch.float16:
            # The inner row of cuDNN casts a whole RNN's weights into one piece; it knows fp16 only.
            return redispatch(keyset & below, *args, **kwargs)
        if category == "banned" and spec.allow_banned:
            category = "fp32"
        elif limit is not None and category == default:
            category = limit
        cast_args, cast_kwargs = cast_rules[category](args, kwargs, low)
        # Kernels run only while the key is included, so clearing the flag puts it back; twice, for
        # a Ctrl-C may hit the first.
        try:
            try:
                exclude(key, True)
                return call(*cast_args, **cast_kwargs)
            finally:
                exclude(key, False)
        finally:
            exclude(key, False)

    return kernel


def _probe(op: str, device: str, rules: ThreadRules) -> Kernel:
    redispatch = dispatcher.overload(op).redispatch
    below = dispatcher.keys_below_autocast(device)

    @untraced
    def kernel(keyset: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.requires_grad:
            rules.backward_begins()
        return redispatch(keyset & below, tensor, *args, **kwargs)

    return kernel


def _needs_kernel(op: str, device: str, native: bool) -> bool:
    if op in NATIVE_DIFFERENCES[device]:
        return True
    return not (native or op in COVERED_INSIDE)
