"""The devices of a model, the accelerator, and the features of the CPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from apex._torch import dtensor
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.modules import named_tensors


def accelerator() -> torch.device | None:
    """Returns the accelerator of this machine, or ``None``.

    ``current_accelerator`` names what torch was built for, whether this machine has it or not.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


_CHECKS = {
    torch.float16: ("fp16", "_is_mkldnn_fp16_supported"),
    torch.bfloat16: ("bf16", "_is_mkldnn_bf16_supported"),
}


def emulation(dtype: torch.dtype | None) -> str:
    """Returns, for instance, ``"bf16 is emulated on this CPU"``; empty if the dtype is not.

    torch emulates a 16-bit dtype, tens of times slower than fp32, where oneDNN lacks kernels for
    the CPU. Only x86 is checked.
    """
    if dtype not in _CHECKS or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    name, check = _CHECKS[dtype]
    is_supported = getattr(torch.ops.mkldnn, check, None)  # None: a build without oneDNN
    if is_supported is not None and is_supported():
        return ""
    return f"{name} is emulated on this CPU"


cpu_features: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
"""Returns the CPU's features by name, such as ``avx512_fp16``.

Older releases of torch know none.
"""


def device_types(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Returns the device types that store and compute the models' parameters and buffers.

    The two differ where ``fully_shard`` offloads parameters to the CPU. Models on the CPU, and
    those without tensors, also count as on the accelerator: scripts may move them there.
    """
    types: dict[str, None] = {}
    for model in models:
        for tensor in named_tensors(model).values():
            if dtensor.is_dtensor(tensor):
                types[tensor.device_mesh.device_type] = None
            types[tensor.device.type] = None
    if not types.keys() <= {"cpu"}:
        return tuple(types)
    device = accelerator()
    if device is None or device.type not in AUTOCAST_KEYS:
        return ("cpu",)
    return device.type, "cpu"
