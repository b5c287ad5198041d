"""Which devices a session is for, and what they are slow at."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from apex._torch import dtensor
from apex._torch.devices import accelerator, cpu_features

EMULATED = "fp16 is emulated on this CPU"


def device_types(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Returns the device types that the models' parameters and buffers live on and compute on.

    The two differ where ``fully_shard`` offloads parameters to the CPU. Models without any count as
    on the accelerator, where there is one, and on the CPU.
    """
    tensors = (t for model in models for t in (*model.parameters(), *model.buffers()))
    found = dict.fromkeys(kind for tensor in tensors for kind in dtensor.device_types(tensor))
    return tuple(found) or all_device_types()


def all_device_types() -> tuple[str, ...]:
    """Returns the accelerator's type, where there is one, and ``"cpu"``."""
    found = accelerator()
    return ("cpu",) if found is None else (found.type, "cpu")


def warn_if_emulated(dtype: torch.dtype | None, types: Iterable[str]) -> None:
    """Warns that fp16 is slow on a CPU that has no fp16 arithmetic."""
    if dtype is torch.float16 and "cpu" in types and not _native_fp16():
        warnings.warn(
            f"{EMULATED}: matrix products are far slower than in fp32. bf16 is the fast choice "
            "here: use opt_level 'O4' instead of 'O1', 'O5' instead of 'O2'.",
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
