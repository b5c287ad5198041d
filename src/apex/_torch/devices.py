"""The devices of a model, the accelerator, and the features of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from apex._torch import dtensor
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.modules import named_tensors


def accelerator() -> torch.device | None:
    """Returns the accelerator of this machine, or ``None``.

    Before torch 2.7 ``current_accelerator`` names what torch was built for.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


cpu_features: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
"""Returns the CPU's features by name, such as ``avx512_fp16``, and its ``architecture``.

Older releases of torch know none.
"""


def emulates_fp16() -> bool:
    """Returns whether the CPU is known to have no fp16 units, so that it emulates fp16."""
    features = cpu_features()
    has_units = features.get("avx512_fp16") or features.get("amx_fp16")
    return features.get("architecture") == "x86_64" and not has_units


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
