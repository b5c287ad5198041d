"""Autocast kernels, which cast an operator's arguments by its row in a live session's table.

Note [Kernels stay]
    torch's autocast state is the only state. Kernels are registered once per process, for
    autocast's dispatch keys alone. Each looks up the newest live session whose dtype is autocast's;
    without one it does what torch's own kernel does.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apex._core.op_casts import CastRule, has_double, has_sparse, rules_for
from apex._core.op_table import (
    COVERED_INSIDE,
    DEVICE_LIMITS,
    NATIVE_DIFFERENCES,
    SPARSE_OPERANDS,
    CastSpec,
    OpTable,
)
from apex._torch import dispatcher
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.dynamo import before_each_run, untraced

Kernel = Callable[..., Any]

_get_dtype = torch.get_autocast_dtype
_live: dict[int, CastSpec] = {}  # oldest first
_digests: dict[int, str] = {}  # by the same numbers
_numbers = itertools.count()
_registered: set[tuple[str, str]] = set()
_lock = threading.Lock()


def begin(spec: CastSpec) -> int:
    """Makes a spec apply under autocast to its dtype; returns the number for :func:`end`.

    Raises:
        ValueError: If a device type has no autocast known to us.
    """
    unknown = [device for device in spec.device_types if device not in AUTOCAST_KEYS]
    if unknown:
        raise ValueError(
            f"Op casts (O1, O4) got a model on {', '.join(unknown)}; they work on "
            f"{', '.join(AUTOCAST_KEYS)}. Use a level without op casts (O0, O2, O3, O5) there."
        )
    with _lock:
        for device in spec.device_types:
            ops = [op for op in _needed(spec.table, device) if (device, op) not in _registered]
            built = {op: _build(op, device) for op in ops}
            if built:
                dispatcher.register(built, AUTOCAST_KEYS[device])
            _registered.update((device, op) for op in ops)
    number = next(_numbers)
    _digests[number] = digest(spec)
    _live[number] = spec
    tag_caches()
    return number


def end(number: int) -> None:
    """Ends what :func:`begin` began; idempotent, and safe in finalizers and in any thread."""
    if _live.pop(number, None) is not None:
        del _digests[number]
        tag_caches()


def newest(device: str, dtype: torch.dtype) -> CastSpec | None:
    """Returns the newest live spec of a device type and dtype."""
    found = _newest(device, dtype)
    return None if found is None else found[1]


def _newest(device: str, dtype: torch.dtype) -> tuple[int, CastSpec] | None:
    for number, spec in reversed([*_live.items()]):
        if spec.dtype is dtype and device in spec.device_types:
            return number, spec
    return None


@functools.cache
def _same_rows(device: str, dtype: torch.dtype, digest: str | None) -> Callable[[], None]:
    """Returns a function that raises once other rows apply than in compiled code."""

    def check() -> None:
        found = _newest(device, dtype)
        if (None if found is None else _digests.get(found[0])) != digest:
            raise RuntimeError("other rows apply now")

    return check


_PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that no compiler traces."""


def digest(spec: CastSpec) -> str:
    """Returns a digest of the rows of a spec."""
    rules = repr((sorted(spec.table.rows.items()), spec.allow_banned))
    return hashlib.sha256(rules.encode()).hexdigest()[:16]


class _Tag(threading.local):
    before: str | None = None


_tag = _Tag()  # torch's settings are those of a thread


def tag_caches() -> None:
    """Names the live rows in the key of compilers' caches, which outlive the process.

    Code compiled under casts has them built in, and the caches do not see the kernels: a process
    without apex would load it. A session that ended in another thread is named until this thread's
    next amp call.
    """
    from torch.compiler import config

    rules = sorted({*_digests.values()})
    if _tag.before is None and rules:
        _tag.before = config.cache_key_tag
    if _tag.before is not None:
        config.cache_key_tag = "-".join([_tag.before, "apex", *rules]) if rules else _tag.before
    if not rules:
        _tag.before = None


def _needed(table: OpTable, device: str) -> Iterator[str]:
    """Yields the operators that torch does not cast as the table says."""
    default = OpTable.default().rows
    for op in sorted({*default, *table.rows, *NATIVE_DIFFERENCES[device]}):
        if dispatcher.has_operator(f"aten::{op}"):
            differs = _row_on(op, device, table) != native_category(op, device)
            if differs or op in SPARSE_OPERANDS:
                yield op


def _row_on(op: str, device: str, table: OpTable) -> str | None:
    category = table.rows.get(op)
    limit = DEVICE_LIMITS.get(device, {}).get(op)
    return category if limit is None or category != OpTable.default().rows.get(op) else limit


@functools.cache  # as it was before our kernels were there
def native_category(op: str, device: str) -> str | None:
    """Returns the category of torch's own autocast for an operator; None if it has no kernel."""
    row = _row_on(op, device, OpTable.default())
    if dispatcher.has_autocast(op, device):
        return NATIVE_DIFFERENCES[device].get(op, row)
    return row if op in COVERED_INSIDE else None


def _build(op: str, device: str) -> Kernel:
    """Returns the kernel of one operator for the autocast key of a device type."""
    redispatch, call = _redispatch(op, device), dispatcher.direct_call(op)
    key = dispatcher.autocast_key(device)
    cudnn = device == "cuda" and torch.version.hip is None
    rules: Mapping[Any, CastRule] = rules_for(op, dispatcher.schema(op))
    exclude = dispatcher.exclude_key
    native, natively = _native_kernel(op, device), native_category(op, device)

    @untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        low = _get_dtype(device)
        found = _newest(device, low)
        spec = None if found is None else found[1]
        if type(args[0]) not in _PLAIN:
            before_each_run(_same_rows(device, low, None if found is None else _digests[found[0]]))
        category = None if spec is None else _row_on(op, device, spec.table)
        keeps = False
        if category == "low_precision" and has_sparse(args):
            category = "fp32"
        elif native is not None and (spec is None or category == natively):
            return native(keyset, *args, **kwargs)
        elif category == "low_precision":
            keeps = has_double(args)
        elif category == "recurrent":
            # The inner row of cuDNN casts a whole RNN's weights into one piece; it knows fp16 only.
            keeps = cudnn and low is torch.float16
        elif category == "fp32_inplace":
            # torch's own kernels work in place on memory of their own.
            keeps = not dispatcher.is_above_autograd(keyset, args[0])
        elif category == "banned" and spec is not None and spec.allow_banned:
            category = "fp32"
        if category is None or keeps:
            # Only this call goes below autocast; the inner operators of a composite still see it.
            return redispatch(keyset, *args, **kwargs)
        cast_args, cast_kwargs = rules[category](args, kwargs, low)
        try:
            exclude(key, True)
            return call(*cast_args, **cast_kwargs)
        finally:
            exclude(key, False)

    return _of_constants(kernel) if op == "equal" else kernel


def _redispatch(op: str, device: str) -> Kernel:
    """Returns what calls an operator below autocast, given the keys that its kernel got."""
    own, call = dispatcher.overload(op).redispatch, dispatcher.direct_call(op)
    key, below = dispatcher.autocast_key(device), dispatcher.keys_below_autocast(device)
    tensors = [str(argument.type) == "Tensor" for argument in dispatcher.schema(op).arguments]

    def redispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = zip(tensors, args, strict=False)
        if not any(one and isinstance(arg, (int, float, complex)) for one, arg in given):
            return own(keyset & below, *args, **kwargs)
        try:  # a number for a tensor, as in x.add(1.0), which no redispatch takes
            dispatcher.exclude_key(key, True)
            return call(*args, **kwargs)
        finally:
            dispatcher.exclude_key(key, False)

    return redispatch


def _native_kernel(op: str, device: str) -> Kernel | None:
    """Returns torch's own autocast kernel of an operator; None if it has none."""
    if not dispatcher.has_autocast(op, device):
        return None
    own = dispatcher.kernel_of(op, AUTOCAST_KEYS[device])
    return restated(op, device) if own is None else own.call_boxed


def restated(op: str, device: str) -> Kernel:
    """Returns what torch's own kernel of an operator does, for a torch before 2.9."""
    category = native_category(op, device)
    redispatch, call = _redispatch(op, device), dispatcher.direct_call(op)
    key = dispatcher.autocast_key(device)
    rules: Mapping[Any, CastRule] = rules_for(op, dispatcher.schema(op))
    rule = rules.get(category)  # "refuses" has none

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if category == "raises":
            raise RuntimeError(f"{op} is unsafe to autocast. Call {op}_with_logits.")
        if rule is None or (category == "low_precision" and has_double(args)):
            return redispatch(keyset, *args, **kwargs)
        cast_args, cast_kwargs = rule(args, kwargs, _get_dtype(device))
        try:
            dispatcher.exclude_key(key, True)
            return call(*cast_args, **cast_kwargs)
        finally:
            dispatcher.exclude_key(key, False)

    return kernel


def _of_constants(kernel: Kernel) -> Kernel:
    """Returns ``kernel`` for TorchScript, too, which compares constants, some of them numbers."""

    @untraced
    def outer(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if all(isinstance(arg, Tensor) for arg in args):
            return kernel(keyset, *args, **kwargs)
        one, other = (arg.tolist() if isinstance(arg, Tensor) else arg for arg in args)
        return one == other

    return outer
