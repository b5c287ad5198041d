"""Which devices a session is for, and what they are slow at."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from apex._torch import dtensor
from apex._torch.dispatcher import AUTOCAST_KEYS

EMULATED = "fp16 is emulated on this CPU"


def device_types(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Returns the device types that the models' parameters and buffers live on and compute on.

    The two differ where ``fully_shard`` offloads parameters to the CPU. Models on the CPU, and
    those without any, count as on the accelerator, too: scripts may move them there.
    """
    tensors = (t for model in models for t in (*model.parameters(), *model.buffers()))
    found = dict.fromkeys(kind for tensor in tensors for kind in dtensor.device_types(tensor))
    return all_device_types() if found.keys() <= {"cpu"} else tuple(found)


def all_device_types() -> tuple[str, ...]:
    """Returns the type of the accelerator, where there is one that has autocast, and ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in AUTOCAST_KEYS:
        return ("cpu",)
    return (accelerator.type, "cpu")


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
    capabilities = torch.cpu.get_capabilities()
    return bool(
        capabilities.get("avx512_fp16")
        or capabilities.get("amx_fp16")
        or capabilities.get("architecture") in ("aarch64", "arm64")
    )
