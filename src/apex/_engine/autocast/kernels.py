"""Builds autocast kernels, and determines which operators need one on a device type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from apex._core.op_casts import CastRule, has_double, rules_for
from apex._core.op_table import (
    COVERED_INSIDE,
    DEVICE_LIMITS,
    FP16_RANGE,
    NATIVE_DIFFERENCES,
    PASSED_ON,
    CastSpec,
    OpTable,
)
from apex._engine.autocast.thread_casts import threads
from apex._torch import dispatcher
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.dynamo import untraced

Kernel = Callable[..., Any]

_get_dtype, _is_on = torch.get_autocast_dtype, torch.is_autocast_enabled


class ThreadRules(Protocol):
    """The op casts of the thread that calls a kernel."""

    def spec(self, device: str) -> CastSpec | None:
        """Returns the spec that applies on a device type; None if no session uses it."""

    def casts_double(self) -> bool:
        """Returns whether low-precision operators cast float64, too."""

    def run_backward(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns ``run(*args, **kwargs)``, which runs a backward pass."""


class Group(NamedTuple):
    """Operators of one device type whose kernels are registered and removed together."""

    device: str
    ops: tuple[str, ...]


class Coverage:
    """torch's own autocast kernels on one device type, read before ours are registered.

    Attributes:
        native: torch's own kernels, by operator of the default table.
        passed_on: Operators without a row that torch's own autocast casts, and ours leaves alone.
    """

    def __init__(self, device: str) -> None:
        self.native: dict[str, Any] = {}
        self._device = device
        self._filled: list[str] = []
        for op in OpTable.default().rows:
            if not dispatcher.has_operator(f"aten::{op}"):
                continue  # not in this torch release
            native = dispatcher.has_autocast(op, device)
            if native:
                own = dispatcher.kernel_of(op, AUTOCAST_KEYS[device])
                self.native[op] = own or _Restated(op, device)
            if _needs_kernel(op, device, native):
                self._filled.append(op)
        self._base = Group(device, tuple(op for op in self._filled if op not in FP16_RANGE))
        self.passed_on = Group(device, PASSED_ON.get(device, ()))

    def groups(self, table: OpTable) -> Iterator[Group]:
        """Yields the groups for a table: the rows that torch lacks, and each row the user changed.

        The first is the same for every table: its kernels look up the row when called.
        """
        yield self._base
        default = OpTable.default().rows
        for op in sorted({*default, *table.rows} - {*self._base.ops}):
            without = None if op in self._filled else default.get(op)
            if table.rows.get(op) != without:
                yield Group(self._device, (op,))

    def native_groups(self) -> list[Group]:
        """Returns the operators left to torch's own kernels, each as a group.

        Excludes those that promote, for which torch's kernels always behave as ours.
        """
        rows = OpTable.default().rows
        left = (op for op in self.native if rows[op] != "promote" and op not in self._base.ops)
        return [Group(self._device, (op,)) for op in left]

    def kernels(self, group: Group, rules: ThreadRules) -> dict[str, Kernel]:
        """Returns a kernel for each operator of a group."""
        if group is self.passed_on:
            return dict.fromkeys(group.ops, dispatcher.pass_on)
        native = self.native
        return {op: build_kernel(op, self._device, rules, native.get(op)) for op in group.ops}


class _Restated:
    """Does what torch's own autocast kernel of one operator does, on a torch before 2.9."""

    def __init__(self, op: str, device: str) -> None:
        row = DEVICE_LIMITS.get(device, {}).get(op, OpTable.default().rows[op])
        self._category = NATIVE_DIFFERENCES[device].get(op, row)
        self._redispatch, self._call = (
            dispatcher.overload(op).redispatch,
            dispatcher.direct_call(op),
        )
        rules: Mapping[Any, CastRule] = rules_for(op, dispatcher.schema(op))
        self._rule = rules.get(self._category)  # "refuses" has none: below autocast it raises
        self._name, self._device = op, device
        self._key = dispatcher.autocast_key(device)
        self._below = dispatcher.keys_below_autocast(device)

    def call_boxed(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Casts and calls, as the kernel that ``torch.library.get_kernel`` returns."""
        if self._category == "banned":
            raise RuntimeError(
                f"{self._name} cannot run under torch.autocast: 16 bits cannot hold the logarithms "
                f"near 0 and 1. Call {self._name}_with_logits, or disable autocast around it."
            )
        keeps_double = self._category == "low_precision" and has_double(args)
        if self._rule is None or keeps_double:
            return self._redispatch(keyset & self._below, *args, **kwargs)
        cast_args, cast_kwargs = self._rule(args, kwargs, _get_dtype(self._device))
        return _below_autocast(self._device, self._key, self._call, cast_args, cast_kwargs)


def _below_autocast(
    device: str, key: Any, call: Kernel, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls an operator with autocast off.

    Note [Sessions that end in a kernel]
        A garbage collection may end a session at any line of a kernel, and turn its casts off. So
        the switch ends as it was then set, if it was; twice, because a Ctrl-C may interrupt the
        first.
    """
    exclude = dispatcher.exclude_key
    here = threads.current
    applied, on = here.applied, _is_on(device)
    try:
        try:
            exclude(key, True)
            return call(*args, **kwargs)
        finally:
            exclude(key, not (on if here.applied is applied else device in here.applied))
    finally:
        exclude(key, not (on if here.applied is applied else device in here.applied))


def build_kernel(op: str, device: str, rules: ThreadRules, native: Any) -> Kernel:
    """Returns the kernel of one operator for the autocast key of a device type.

    It casts by the operator's row in the spec of the calling thread, or calls torch's own kernel if
    that follows the table. Without a spec it behaves as torch does.

    Args:
        op: Operator and overload, such as ``"pow.Scalar"``.
        device: Device type.
        rules: The op casts of the calling thread.
        native: torch's own autocast kernel, or None.
    """
    redispatch, call = dispatcher.overload(op).redispatch, dispatcher.direct_call(op)
    cudnn = device == "cuda" and torch.version.hip is None
    cast_rules = rules_for(op, dispatcher.schema(op))
    default = OpTable.default().rows.get(op)
    limit = DEVICE_LIMITS.get(device, {}).get(op)
    follows = native is not None and limit is None and op not in NATIVE_DIFFERENCES[device]
    key, below = dispatcher.autocast_key(device), dispatcher.keys_below_autocast(device)
    exclude = dispatcher.exclude_key

    @untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        spec = rules.spec(device)
        category = None if spec is None else spec.table.rows.get(op)
        if follows and category == default:
            if not (has_double(args) and rules.casts_double()):
                return native.call_boxed(keyset, *args, **kwargs)
        elif spec is None and native is not None and _is_on(device):
            return native.call_boxed(keyset, *args, **kwargs)
        if spec is None or category is None:
            # Only this call goes below autocast; the inner operators of a composite still see it.
            return redispatch(keyset & below, *args, **kwargs)
        if category == "low_precision" and has_double(args) and not rules.casts_double():
            return redispatch(keyset & below, *args, **kwargs)
        low = _get_dtype(device)
        if category == "recurrent" and cudnn and low is torch.float16:
            # The inner row of cuDNN casts a whole RNN's weights into one piece; it knows fp16 only.
            return redispatch(keyset & below, *args, **kwargs)
        if category == "banned" and spec.allow_banned:
            category = "fp32"
        elif limit is not None and category == default:
            category = limit
        cast_args, cast_kwargs = cast_rules[category](args, kwargs, low)
        # As _below_autocast, whose frame would cost 0.1 us a call.
        here = threads.current
        applied, on = here.applied, _is_on(device)
        try:
            try:
                exclude(key, True)
                return call(*cast_args, **cast_kwargs)
            finally:
                exclude(key, not (on if here.applied is applied else device in here.applied))
        finally:
            exclude(key, not (on if here.applied is applied else device in here.applied))

    return _of_scripts(kernel, op, device, default)


def _of_constants(kernel: Kernel) -> Kernel:
    """Returns ``kernel`` for TorchScript's passes, too.

    They compare constants of equal dtypes, of which some come as numbers.
    """

    @untraced
    def outer(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if all(isinstance(arg, Tensor) for arg in args):
            return kernel(keyset, *args, **kwargs)
        one, other = (arg.tolist() if isinstance(arg, Tensor) else arg for arg in args)
        return one == other

    return outer


def _of_scripts(kernel: Kernel, op: str, device: str, category: str | None) -> Kernel:
    """Returns ``kernel`` for the calls of scripts, where torch's own must not be cast.

    torch's kernels copy with ``to``, too, and rely on the dtype; they may pass a number. They work
    in place on memory of their own. Those calls do not come from above autograd.
    """
    if op == "equal":
        return _of_constants(kernel)
    if category not in ("to_cpu", "fp32_inplace"):
        return kernel
    redispatch, below = dispatcher.overload(op).redispatch, dispatcher.keys_below_autocast(device)
    key, call = dispatcher.autocast_key(device), dispatcher.direct_call(op)

    @untraced
    def outer(keyset: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(source, Tensor):  # which `redispatch` does not take
            return _below_autocast(device, key, call, (source, *args), kwargs)
        if dispatcher.is_above_autograd(keyset, source):
            return kernel(keyset, source, *args, **kwargs)
        return redispatch(keyset & below, source, *args, **kwargs)

    return outer


def _needs_kernel(op: str, device: str, native: bool) -> bool:
    if op in NATIVE_DIFFERENCES[device] or op in DEVICE_LIMITS.get(device, {}):
        return True
    return not (native or op in COVERED_INSIDE)
