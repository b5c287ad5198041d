"""torch's dispatcher: which autocast kernels there are, and how to add and call one.

Nothing here has a plain form: op casts stand on what autocast covers on a device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
}
"""Dispatch key of autocast by device type."""

has_operator: Callable[[str], bool] = torch._C._dispatch_has_kernel
"""Returns whether this torch has an operator, such as ``"aten::exp"``."""

has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Returns whether an operator has a kernel for a dispatch key, such as ``"AutocastCPU"``."""

exclude_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Excludes a dispatch key in this thread, or includes it again; 0.7 us less than a guard object."""


release = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor number of the installed torch; nothing above this package asks for it."""

weight_cache_is_safe = release >= (2, 11)
"""Whether autocast's weight cache tells casts with a gradient from those under ``no_grad``.

Before torch 2.11 a weight whose first use is under ``no_grad`` gets no gradient from later ones.
"""


def autocast_key(device: str) -> Any:
    """Returns the dispatch key of a device type's autocast."""
    return getattr(torch._C.DispatchKey, AUTOCAST_KEYS[device])


def keys_below_autocast(device: str) -> Any:
    """Returns the set of dispatch keys that come after a device type's autocast."""
    return torch._C._dispatch_keyset_full_after(autocast_key(device))


_get_kernel: Callable[..., Any] | None = getattr(torch.library, "get_kernel", None)  # torch 2.9


def has_autocast(op: str, device: str) -> bool:
    """Returns whether torch itself has an autocast kernel for an operator on a device type."""
    return has_kernel(f"aten::{op}", AUTOCAST_KEYS[device])


def autocast_kernel(op: str, device: str) -> Any:
    """Returns the autocast kernel that an operator has; None where torch (< 2.9) hands out none."""
    return None if _get_kernel is None else _get_kernel(f"aten::{op}", AUTOCAST_KEYS[device])


def overload(op: str) -> Any:
    """Returns the overload of aten that ``op``, such as ``"pow.Scalar"``, names."""
    name, _, rest = op.partition(".")
    return getattr(getattr(torch.ops.aten, name), rest or "default")


def schema(op: str) -> torch.FunctionSchema:
    """Returns the schema of an operator of aten."""
    found: torch.FunctionSchema = overload(op)._schema
    return found


def direct_call(op: str) -> Callable[..., Any]:
    """Returns what calls an operator of aten in 0.2 us less than its overload does."""
    found: Callable[..., Any] = overload(op)._op
    return found


def register(kernels: dict[str, Callable[..., Any]], device: str) -> Callable[[], None]:
    """Registers autocast kernels by operator; returns what removes them.

    Each is called with the dispatch keys of its call, then with the operator's arguments.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns of kernels that take the place of its own; ours call those, and go again.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for op, kernel in kernels.items():
            library.impl(op, kernel, AUTOCAST_KEYS[device], with_keyset=True)  # type: ignore[no-untyped-call]
    return library._destroy
