"""Validates models sharded by ``fully_shard`` (FSDP2), and optimizers of DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from apex._core import dtypes
from apex._core.param_groups import params_of
from apex._engine.model.plan import Planned
from apex._torch import dtensor, fsdp

ORDER = (
    "    fully_shard(model)\n"
    "    optimizer = Optimizer(model.parameters())\n"
    "    model, optimizer = amp.initialize(model, optimizer)"
)


def check_order(models: Iterable[nn.Module], params: Sequence[Tensor]) -> None:
    """Raises if ``fully_shard`` was called after ``initialize`` and left stale parameters.

    ``params`` are those of the models at ``initialize`` that the session's optimizers train.

    Raises:
        RuntimeError: If the optimizers train parameters that ``fully_shard`` replaced.
    """
    plain = [param for param in params if not dtensor.is_dtensor(param)]
    sharded = [model for model in models if plain and any(fsdp.sharded_modules(model))]
    if not sharded:
        return
    present = {id(param) for model in models for param in model.parameters()}
    if any(id(param) not in present for param in plain):
        raise RuntimeError(
            "fully_shard was called after amp.initialize. It replaced the model's parameters, so "
            f"the optimizer steps parameters no longer in the model. Use this order:\n{ORDER}"
        )


def check(
    model: nn.Module,
    planned: Iterable[Planned],
    remedy: str,
    *,
    op_casts: bool = False,
) -> None:
    """Raises if the parameters of a sharded model cannot take their dtypes; changes nothing.

    Args:
        model: A model whose parameters are to be cast.
        planned: What the plan does to each parameter and buffer.
        remedy: The option to change so that parameters kept in fp32 are cast, too.
        op_casts: Whether operators cast, so that ``fully_shard`` may compute in any dtype.

    Raises:
        RuntimeError: With the reason.
    """
    target = {}
    changed: set[int] = set()
    for name, tensor, dtype in planned:
        if dtypes.is_castable(tensor):
            target[id(tensor)] = (name, dtype)
            if tensor.dtype is not dtype and dtensor.is_dtensor(tensor):
                _check_hooks(name, tensor)
                changed.add(id(tensor))
    for group in fsdp.param_groups(model):
        params = fsdp.sharded_params(group)
        if not changed.isdisjoint(map(id, params)):
            _check_not_run(model, group)
        trained = [target[id(p)] for p in params if p.requires_grad and id(p) in target]
        _check_one_dtype(trained, remedy)
        if not op_casts:
            _check_policy(group, trained)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises if the optimizer cannot step the DTensors that it holds.

    Raises:
        RuntimeError: With the reason.
    """
    if not any(map(dtensor.is_dtensor, params_of(optimizer))):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, SGD | Adagrad) and any(g.get("fused") for g in optimizer.param_groups):
        raise RuntimeError(
            f"amp.initialize got {name}(fused=True) with DTensor parameters (fully_shard, tensor "
            "parallel), which torch supports in fused Adam and AdamW only. Drop fused=True from "
            f"{name}."
        )
    if not getattr(optimizer, "steps_dtensors", True):
        raise RuntimeError(
            f"amp.initialize got {name} with DTensor parameters (fully_shard, tensor parallel), "
            "but its update rule needs whole tensors. Use FusedAdam or FusedLAMB from "
            "apex.optimizers, or an optimizer from torch.optim."
        )


def check_restorable(model: nn.Module) -> None:
    """Raises if ``fully_shard`` can no longer change dtypes, as ``amp.restore`` needs.

    Raises:
        RuntimeError: If the model has run.
    """
    for group in fsdp.param_groups(model):
        if fsdp.has_run(group):
            raise RuntimeError(
                f"amp.restore got the model {type(model).__name__}, whose 16-bit parameters "
                "fully_shard has already gathered, which fixes the dtype of its buffers. Load "
                "model.state_dict(), which is in fp32, into a new model."
            )


def _check_hooks(name: str, param: Tensor) -> None:
    # A DTensor's dtype is changed by torch.utils.swap_tensors, which drops hooks.
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            f"amp.initialize got a model whose parameter {name} is a DTensor with gradient hooks, "
            "which a change of its dtype would lose. Register them after amp.initialize, or use "
            "opt_level 'O1' or 'O4', which leave fp32 parameters as they are."
        )


def _check_not_run(model: nn.Module, group: Any) -> None:
    if fsdp.has_run(group):
        raise RuntimeError(
            f"amp.initialize got the model {type(model).__name__}, which has already run under "
            "fully_shard, and that fixes the dtype of its buffers. Call amp.initialize before the "
            "first forward pass, or use opt_level 'O1' or 'O4', which do not cast fp32 parameters."
        )


def _check_one_dtype(trained: Sequence[tuple[str, torch.dtype]], remedy: str) -> None:
    by_dtype = {dtype: name for name, dtype in trained}
    if len(by_dtype) > 1:
        listed = " and ".join(f"{name} ({dtypes.name(d)})" for d, name in by_dtype.items())
        raise RuntimeError(
            f"amp.initialize got a model in which fully_shard gathers {listed} together; a group "
            "takes one dtype. Call fully_shard on the modules that stay in fp32 separately, "
            f"before their parents, or let them be cast: {remedy}."
        )


def _check_policy(group: Any, trained: Sequence[tuple[str, torch.dtype]]) -> None:
    wanted = fsdp.compute_dtype(group)
    for name, dtype in trained:
        if wanted not in (None, dtype):
            raise RuntimeError(
                f"This level keeps {name} in {dtypes.name(dtype)}, but fully_shard was set to "
                f"compute in {dtypes.name(wanted)} (MixedPrecisionPolicy.param_dtype). Leave "
                "param_dtype out (reduce_dtype may stay), or use opt_level 'O1' or 'O4'."
            )
