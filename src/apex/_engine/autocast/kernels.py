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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import op_rows
from apex._core.op_casts import has_sparse, rules_for, widest
from apex._core.op_table import AutocastSpec, OpTable
from apex._torch import dispatcher
from apex._torch.autograd import autocast_depth, backward_id
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.dynamo import before_each_run, untraced

Kernel = Callable[..., Any]

_PLAIN = (Tensor, nn.Parameter)  # what no compiler traces

_live: dict[int, AutocastSpec] = {}  # oldest first
_numbers = itertools.count()
_registered: set[tuple[str, str]] = set()
_lock = threading.Lock()


def begin(spec: AutocastSpec) -> int:
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
            if ops:
                built = {op: _build(op, device) for op in ops}
                dispatcher.register(built, AUTOCAST_KEYS[device])
            _registered.update((device, op) for op in ops)
    number = next(_numbers)
    _live[number] = spec
    tag_caches()
    return number


def end(number: int) -> None:
    """Ends what :func:`begin` began; idempotent, and safe in finalizers and in any thread."""
    _live.pop(number, None)
    tag_caches()


def newest(device: str, dtype: torch.dtype) -> AutocastSpec | None:
    """Returns the newest live spec of a device type and dtype."""
    for spec in reversed([*_live.values()]):
        if spec.dtype is dtype and device in spec.device_types:
            return spec
    return None


@functools.cache
def _guard(device: str, dtype: torch.dtype, spec: AutocastSpec | None) -> Callable[[], None]:
    """Returns a function that raises once other rows apply than in compiled code."""

    def check() -> None:
        now = newest(device, dtype)
        if now is not spec and now != spec:
            raise RuntimeError("other rows apply now")

    return check


_TAG = "-apex-"


@functools.cache
def digest(spec: AutocastSpec) -> str:
    """Returns a digest of the rows of a spec."""
    rules = repr((sorted(spec.table.rows.items()), spec.allow_banned))
    return hashlib.sha256(rules.encode()).hexdigest()[:16]


def tag_caches() -> None:
    """Names the live rows in the key of compilers' caches, which outlive the process.

    Code compiled under casts has them built in, and the caches do not see the kernels: a process
    without apex would load it. Each thread has its own key, so a session that ended in another
    thread is named until this thread's next amp call.
    """
    from torch.compiler import config

    rules = "-".join(sorted({*map(digest, _live.values())}))
    config.cache_key_tag = config.cache_key_tag.partition(_TAG)[0] + (_TAG + rules) * bool(rules)


def _needed(table: OpTable, device: str) -> Iterator[str]:
    """Yields the operators that torch does not cast as the table says."""
    default = OpTable.default().rows
    for op in sorted({*default, *table.rows, *op_rows.NATIVE_DIFFERENCES[device]}):
        if dispatcher.has_operator(f"aten::{op}"):
            differs = _row(op, device, table) != native_category(op, device)
            if differs or op in op_rows.SPARSE_OPERANDS:
                yield op


def _row(op: str, device: str, table: OpTable) -> str | None:
    category = table.rows.get(op)
    limit = op_rows.DEVICE_LIMITS.get(device, {}).get(op)
    return category if limit is None or category != OpTable.default().rows.get(op) else limit


@functools.cache  # as it was before our kernels were there
def native_category(op: str, device: str) -> str | None:
    """Returns the category of torch's own autocast for an operator; None if it has no kernel."""
    row = _row(op, device, OpTable.default())
    if dispatcher.has_autocast(op, device):
        return op_rows.NATIVE_DIFFERENCES[device].get(op, row)
    return row if op in op_rows.COVERED_INSIDE else None


def _build(op: str, device: str) -> Kernel:
    """Returns the kernel of one operator for the autocast key of a device type."""
    call, rules = dispatcher.direct_call(op), rules_for(op, dispatcher.schema(op))
    fall_through, uncast = _fall_through(op, device), dispatcher.without_autocast(device)
    own, native = dispatcher.own_kernel(op, device), native_category(op, device)
    sessionless = native if dispatcher.has_autocast(op, device) else None

    @untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype(device)
        spec = newest(device, low)
        if type(args[0]) not in _PLAIN:
            before_each_run(_guard(device, low, spec))
        # As autograd's formulas; a recompute is in a block of torch's, or enables gradients.
        bare = spec is not None and backward_id() != -1 and autocast_depth() == 0
        if bare and not torch.is_grad_enabled() and widest(args, kwargs) is None:
            return fall_through(keyset, *args, **kwargs)
        category = sessionless if spec is None else _category(op, device, spec, keyset, args)
        if own is not None and category == native:
            return own(keyset, *args, **kwargs)
        rule = rules.get(category)
        if rule is None:
            return fall_through(keyset, *args, **kwargs)
        args, kwargs = rule(args, kwargs, low)  # type: ignore[assignment]
        with uncast():
            return call(*args, **kwargs)

    return _of_constants(kernel) if op == "equal" else kernel


def _category(op: str, device: str, spec: AutocastSpec, keyset: Any, args: Any) -> str | None:
    """Returns how one call casts; None if not at all."""
    category = _row(op, device, spec.table)
    if category == "low_precision" and has_sparse(args):
        return "fp32"
    if category in ("banned", "banned_16bit") and spec.allow_banned:
        return "fp32"
    if category == "recurrent" and device == "cuda" and torch.version.hip is None:
        # The inner row of cuDNN casts a whole RNN's weights into one piece; it knows fp16 only.
        return None if spec.dtype is torch.float16 else category
    if category == "fp32_inplace" and not dispatcher.is_above_autograd(keyset, args[0]):
        return None  # torch's own kernels work in place on memory of their own
    return category


def _fall_through(op: str, device: str) -> Kernel:
    """Returns what calls an operator below autocast; inner ones of a composite still see it."""
    own, call = dispatcher.overload(op).redispatch, dispatcher.direct_call(op)
    uncast, below = dispatcher.without_autocast(device), dispatcher.keys_below_autocast(device)
    # torch takes numbers for the second tensor of some: x.add(1.0).
    types = [str(argument.type) for argument in dispatcher.schema(op).arguments]
    takes_number = types[:2] == ["Tensor", "Tensor"]

    def fall_through(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not takes_number or isinstance(args[1], Tensor):
            return own(keyset & below, *args, **kwargs)
        with uncast():  # no redispatch takes them
            return call(*args, **kwargs)

    return fall_through


def _of_constants(kernel: Kernel) -> Kernel:
    """Returns ``kernel`` for TorchScript, too, which compares constants, some of them numbers."""

    @untraced
    def outer(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if all(isinstance(arg, Tensor) for arg in args):
            return kernel(keyset, *args, **kwargs)
        one, other = (arg.tolist() if isinstance(arg, Tensor) else arg for arg in args)
        return one == other

    return outer
