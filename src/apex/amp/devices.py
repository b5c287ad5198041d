"""The device types of a session, and a warning about emulated fp16."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from apex._torch import dtensor
from apex._torch.devices import accelerator, cpu_features
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.modules import named_tensors

EMULATED = "fp16 is emulated on this CPU"


def device_types(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Returns the device types that store and compute the models' parameters and buffers.

    The two differ where ``fully_shard`` offloads parameters to the CPU. Models on the CPU, and
    those without tensors, count as on the accelerator, too: scripts may move them there.
    """
    tensors = (tensor for model in models for tensor in named_tensors(model).values())
    found = dict.fromkeys(kind for tensor in tensors for kind in dtensor.device_types(tensor))
    return all_device_types() if found.keys() <= {"cpu"} else tuple(found)


def all_device_types() -> tuple[str, ...]:
    """Returns the accelerator's type, if there is one with autocast, and ``"cpu"``."""
    found = accelerator()
    return ("cpu",) if found is None or found.type not in AUTOCAST_KEYS else (found.type, "cpu")


def warn_if_emulated(dtype: torch.dtype | None, types: Iterable[str]) -> None:
    """Warns if ``dtype`` is fp16 on a CPU without fp16 arithmetic, which is slow."""
    if dtype is torch.float16 and "cpu" in types and not _native_fp16():
        warnings.warn(
            f"{EMULATED}: matrix products are far slower than in fp32. Use bf16 here: opt_level "
            "'O4' instead of 'O1', or 'O5' instead of 'O2'.",
            UserWarning,
            stacklevel=4,
        )


def _native_fp16() -> bool:
    capabilities = cpu_features()
    return bool(
        capabilities.get("avx512_fp16")
        or capabilities.get("amx_fp16")
        or capabilities.get("architecture") in ("aarch64", "arm64")
    )
