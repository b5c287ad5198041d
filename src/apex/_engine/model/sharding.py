"""Validates models sharded by ``fully_shard`` (FSDP2), and optimizers of DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._engine.model.plan import ModelPlan
from apex._torch import dtensor, fsdp

ORDER = (
    "    fully_shard(model)\n"
    "    optimizer = Optimizer(model.parameters())\n"
    "    model, optimizer = amp.initialize(model, optimizer)"
)

POLICY = (
    "    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype}))\n"
    "    model, optimizer = amp.initialize(model, optimizer, opt_level='O0'{scale})"
)


def check_order(models: Iterable[nn.Module], params: Sequence[Tensor]) -> None:
    """Raises if ``fully_shard`` was called after ``initialize`` and left stale parameters.

    ``params`` are those of the models at ``initialize`` that the session's optimizers train.

    Raises:
        RuntimeError: If the optimizers train parameters that ``fully_shard`` replaced.
    """
    models = [*models]
    present = {id(param) for model in models for param in model.parameters()}
    gone = [p for p in params if not dtensor.is_dtensor(p) and id(p) not in present]
    if gone and any(module for model in models for module in fsdp.sharded_modules(model)):
        raise RuntimeError(
            "fully_shard was called after amp.initialize. It replaced the model's parameters, so "
            f"the optimizer steps parameters no longer in the model. Use this order:\n{ORDER}"
        )


def check(planned: Iterable[tuple[Any, ...]]) -> None:
    """Raises if DTensors would be cast, or stay in 16 bits; changes nothing.

    Args:
        planned: Name, tensor and dtype of each parameter and buffer under the plan.

    Raises:
        RuntimeError: With the way to train a sharded model in 16 bits.
    """
    for name, tensor, dtype, *_ in planned:
        if not dtensor.is_dtensor(tensor) or not dtypes.is_castable(tensor):
            continue
        if dtype in dtypes.LOW_PRECISION:
            low = dtypes.name(dtype)
            scale = ", loss_scale='dynamic'" if dtype is torch.float16 else ""
            raise RuntimeError(
                f"amp.initialize got a model whose {name} is a DTensor (fully_shard, tensor "
                f"parallel), which O2, O3 and O5 do not cast to {low}. fully_shard casts by itself "
                "and keeps fp32 shards, which the optimizer steps as masters:\n"
                + POLICY.format(dtype=low, scale=scale)
            )
        if tensor.dtype is not dtype:
            raise RuntimeError(
                f"amp.initialize got a model whose {name} is a DTensor in "
                f"{dtypes.name(tensor.dtype)}; this level trains {dtypes.name(dtype)}. Call "
                "model.float() before fully_shard."
            )


def inputs_left(model: nn.Module, plan: ModelPlan) -> ModelPlan:
    """Returns the plan, without casts of inputs where ``fully_shard`` computes in 16 bits."""
    low = any(fsdp.compute_dtype(group) for group in fsdp.param_groups(model))
    return replace(plan, input_dtype=None) if low else plan


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises if the optimizer cannot step the DTensors that it holds.

    Raises:
        RuntimeError: With the reason.
    """
    if getattr(optimizer, "steps_dtensors", True):
        return
    if any(map(dtensor.is_dtensor, params_of(optimizer))):
        raise RuntimeError(
            f"amp.initialize got {type(optimizer).__name__} with DTensor parameters (fully_shard, "
            "tensor parallel), but its update rule needs whole tensors. Use FusedAdam or FusedLAMB "
            "from apex.optimizers, or an optimizer from torch.optim."
        )
