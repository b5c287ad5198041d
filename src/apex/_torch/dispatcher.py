"""torch's dispatcher: finds and registers autocast kernels.

There are no fallbacks in public torch: op casts depend on the dispatcher.
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

python_kernels: set[str] = torch.library._impls
"""The kernels that Python code has registered, such as ``"aten/exp/AutocastCPU"``."""

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor number of the installed torch; nothing above this package asks for it."""

weight_cache_is_safe = TORCH_VERSION >= (2, 11)
"""Whether autocast's weight cache separates casts with a gradient from casts under ``no_grad``.

Before torch 2.11 a weight whose first use is under ``no_grad`` gets no gradient from later uses.
"""


def is_under_autocast(tensor: torch.Tensor) -> bool:
    """Returns whether autocast is on for the tensor's device type."""
    device = tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)  # raises for meta tensors


def is_above_autograd(keyset: Any, tensor: torch.Tensor) -> bool:
    """Returns whether a kernel with ``keyset`` was called from outside torch's own kernels.

    In inference mode there is no autograd, so every call counts.
    """
    has_autograd: bool = keyset.has(torch._C.DispatchKey.AutogradFunctionality)  # of any device
    return has_autograd or torch.is_inference_mode_enabled() or tensor.is_inference()


def keys_below_autocast(device: str) -> Any:
    """Returns the set of dispatch keys that come after a device type's autocast."""
    return torch._C._dispatch_keyset_full_after(
        getattr(torch._C.DispatchKey, AUTOCAST_KEYS[device])
    )


def overload(op: str) -> Any:
    """Returns the aten overload named ``op``, such as ``"pow.Scalar"``."""
    name, _, rest = op.partition(".")
    return getattr(getattr(torch.ops.aten, name), rest or "default")


def overloads_of(name: str) -> tuple[str, ...]:
    """Returns the overloads of an aten operator, without ``out=`` variants."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return ()
    ops = []
    for overload_name in packet.overloads():
        op = name if overload_name == "default" else f"{name}.{overload_name}"
        if not has_operator(f"aten::{op}"):
            continue
        if not any(argument.is_out for argument in overload(op)._schema.arguments):
            ops.append(op)
    return tuple(ops)


def is_builtin(name: str) -> bool:
    """Returns whether ``torch.nn.functional.name`` calls the operator of its name."""
    return hasattr(torch, name) or hasattr(torch._C._nn, name)


# Its end would remove the kernels.
_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def register(op: str, kernel: Callable[..., Any], key: str) -> None:
    """Registers the kernel of an operator for a dispatch key, permanently.

    The kernel receives the call's dispatch key set, then the operator's arguments.
    """
    with warnings.catch_warnings():
        # torch warns about replaced kernels; ours call the originals.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _library.impl(op, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
