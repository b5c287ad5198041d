"""One operator's autocast kernel, and what torch's own autocast covers on a device type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from apex._core.op_casts import has_double, rules_for
from apex._core.op_table import COVERED_INSIDE, CastSpec, Category, OpTable
from apex._torch.dispatch import has_kernel, has_operator
from apex._torch.dynamo import untraced

KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
}
"""Dispatch key of autocast by device type."""

Ruling = Callable[[str], CastSpec | None]
"""Returns the spec whose rows hold in the calling thread on a device type; None for none."""


class Group(NamedTuple):
    """Operators of one device type whose kernels come and go together."""

    device: str
    ops: tuple[str, ...]


class Coverage:
    """What torch's own autocast covers on one device type; read before any kernel of ours is there.

    Attributes:
        native: torch's own kernels, by operator of the default table.
    """

    def __init__(self, device: str) -> None:
        self.native: dict[str, Any] = {}
        self._device = device
        filled: list[str] = []
        for op, category in OpTable.default().rows.items():
            if not has_operator(f"aten::{op}"):
                continue  # an operator of another torch release
            if has_kernel(f"aten::{op}", KEYS[device]):
                self.native[op] = torch.library.get_kernel(f"aten::{op}", KEYS[device])
            if _needs_kernel(op, category, device, op in self.native):
                filled.append(op)
        self._base = Group(device, tuple(filled))

    def groups(self, table: OpTable) -> Iterator[Group]:
        """Yields what a table needs: the rows that torch lacks, and each row that the user changed.

        The first is the same for every table: its kernels read the row that holds at the call.
        """
        yield self._base
        default = OpTable.default().rows
        for op in sorted({*default, *table.rows}):
            if table.rows.get(op) != default.get(op) and op not in self._base.ops:
                yield Group(self._device, (op,))

    def native_low_precision(self) -> list[Group]:
        """Returns the low-precision operators that torch casts itself, each a group."""
        rows = OpTable.default().rows
        return [Group(self._device, (op,)) for op in self.native if rows[op] == "low_precision"]


def build_kernel(op: str, device: str, ruling: Ruling, native: Any) -> Callable[..., Any]:
    """Returns the kernel of one operator for the autocast key of a device type.

    Where a spec rules the calling thread it casts by the operator's row. Without a spec or a row it
    does what torch does without the kernel.

    Args:
        op: Operator and overload, such as ``"pow.Scalar"``.
        device: Device type.
        ruling: Finds the spec of the calling thread.
        native: torch's own autocast kernel, or None where it has none.
    """
    target = _overload(op)
    call = target._op  # 0.2 us less than calling the overload itself
    rules = rules_for(target._schema)
    default = OpTable.default().rows.get(op)
    key = getattr(torch._C.DispatchKey, KEYS[device])
    below = torch._C._dispatch_keyset_full_after(key)
    # A guard object would do the same for 0.7 us more. Kernels run only while the key is included,
    # so clearing the flag is putting it back.
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded

    @untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        spec = ruling(device)
        category = None if spec is None else spec.table.rows.get(op)
        if native is not None and (
            spec is None or (category == default != "banned" and not has_double(args))
        ):
            return native.call_boxed(keyset, *args, **kwargs)
        if spec is None or category is None:
            # Only this call goes below autocast: the inner operators of a composite meet it still.
            return target.redispatch(keyset & below, *args, **kwargs)
        cast = rules[category](op, spec, device, args, kwargs)
        exclude(key, True)
        try:
            return call(*cast[0], **cast[1])
        finally:
            exclude(key, False)

    return kernel


def _needs_kernel(op: str, category: Category, device: str, native: bool) -> bool:
    if category == "banned":
        return True
    # cuDNN's own row flattens the weights of a whole RNN again; plain casts would undo that.
    own_recurrent = category == "recurrent" and device == "cuda" and torch.version.hip is None
    return not (native or own_recurrent or op in COVERED_INSIDE)


def _overload(op: str) -> Any:
    name, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")
