"""Validates a model before conversion; raises before changing it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, jit, nn
from torch.nn import Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from apex._engine.model import sharding
from apex._engine.model.plan import (
    ModelPlan,
    Rule,
    fp32_modules,
    matches,
    named_submodules,
    own_tensors,
    planned_dtypes,
)
from apex._engine.model.state import is_converted, state_of
from apex._torch import fsdp


def check(
    model: nn.Module,
    plan: ModelPlan,
    *,
    op_casts: bool = False,
    allow_float64: bool = False,
    others: Sequence[nn.Module] = (),
) -> None:
    """Raises where ``model`` cannot be converted as ``plan`` says; changes nothing.

    Args:
        model: The model to convert.
        plan: The conversion.
        op_casts: Whether operators cast their inputs, which float64 weights do not take.
        allow_float64: Whether the model may come with such weights all the same.
        others: Further models of the same call: it is enough that an entry of
            ``plan.fp32_modules`` matches in one of them.

    Raises:
        TypeError: If ``model`` is no ``torch.nn.Module``.
        RuntimeError: Under ``torch.inference_mode()``; if the model is converted, wrapped for
            parallel training, scripted, not materialized, in float64 where operators cast, or
            sharded in a way that conflicts with the plan's dtypes.
        ValueError: If ``plan.fp32_modules`` does not fit the model.
    """
    _check_mode()
    _check_kind(model)
    fsdp.reshard(model)
    for name, tensor in _tensors(model):
        _check_materialized(name, tensor)
        if op_casts and not allow_float64:
            _check_precision(name, tensor)
    _check_fp32_modules(model, plan, others)
    sharding.check(model, planned_dtypes(model, plan), _remedy(plan), op_casts=op_casts)


def check_restorable(model: nn.Module) -> None:
    """Raises RuntimeError where a converted model's parameters cannot go back to fp32."""
    state = state_of(model)
    if state is not None and state.plan.casts_down:
        sharding.check_restorable(model)


def _remedy(plan: ModelPlan) -> str:
    return "drop entries of fp32_modules" if plan.fp32_modules else "keep_batchnorm_fp32=False"


def _check_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "amp.initialize was called under torch.inference_mode(), where parameters cannot be "
            "converted to train later. Call it before the block, and only the model inside; "
            "torch.no_grad() does not have this limit."
        )


def _check_kind(model: object) -> None:
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"amp.initialize got a model of type {kind}; it takes a torch.nn.Module, or a list or "
            "tuple of them."
        )
    if is_converted(model):
        raise RuntimeError(
            f"amp.initialize got the model {kind} that it has already prepared. Pass each model "
            "once; to prepare it anew, undo the first with amp.restore(model)."
        )
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise RuntimeError(
            f"amp.initialize got a model that is wrapped in {kind}. It takes the model itself: "
            f"call amp.initialize first, then wrap what it returns in {kind}."
        )
    if any(fsdp.is_fsdp1(module) for module in model.modules()):
        raise RuntimeError(
            f"amp.initialize got a model ({kind}) with FullyShardedDataParallel in it, which keeps "
            "parameters in flat pieces that amp cannot tell apart. Use fully_shard of "
            f"torch.distributed.fsdp, which shards each parameter:\n{sharding.ORDER}"
        )
    if type(model).__module__.partition(".")[0] == "deepspeed":
        raise RuntimeError(
            f"amp.initialize got a model that is wrapped in DeepSpeed's {kind}, which casts and "
            "scales by itself. Switch on its own fp16 or bf16 section, or leave DeepSpeed out."
        )
    if isinstance(model, jit.ScriptModule):
        raise RuntimeError(
            f"amp.initialize got a scripted model ({kind}), whose forward is compiled and cannot "
            "cast. Pass the plain module; torch.compile and torch.jit.trace take what amp returns."
        )


def _check_materialized(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise RuntimeError(
            f"amp.initialize got a model whose {name} is not initialized yet (a lazy module). Run "
            "one batch through the model first, so that its shapes are known."
        )
    if tensor.is_meta:
        raise RuntimeError(
            f"amp.initialize got a model whose {name} is on the meta device and holds no values. "
            "Materialize the model first: model.to_empty(device=...), then load its weights."
        )


def _check_precision(name: str, tensor: Tensor) -> None:
    # A 0-d one goes with any dtype, as a Python number does.
    if tensor.dtype is torch.float64 and tensor.dim() and isinstance(tensor, Parameter):
        raise RuntimeError(
            f"amp.initialize got a model whose {name} is float64; the op casts of O1 and O4 leave "
            "weights as they are, and float64 does not go with 16-bit inputs. Call model.float() "
            "first, or use a level that converts the model (O0, O2, O3, O5)."
        )


def _check_fp32_modules(model: nn.Module, plan: ModelPlan, others: Sequence[nn.Module]) -> None:
    for rule in _unmatched_rules((model, *others), plan):
        shown = repr(rule) if isinstance(rule, str) else rule.__name__
        close = _close_matches(rule, (model, *others))
        hint = f"Close to it: {', '.join(close)}." if close else "Nothing comes close to it."
        raise ValueError(
            f"fp32_modules holds {shown}, which matches no module below {type(model).__name__}. "
            f"{hint} Names are those of model.named_modules()."
        )
    shared = _shared_across(model, plan)
    if shared:
        kept, cast = shared
        raise ValueError(
            f"{kept} stays in fp32 (by fp32_modules or keep_batchnorm_fp32), but is the same "
            f"tensor as {cast}, which is to be cast. Let both stay, by an entry in fp32_modules "
            "for the second module, or neither."
        )


def _unmatched_rules(models: Sequence[nn.Module], plan: ModelPlan) -> list[Rule]:
    modules = [pair for model in models for pair in named_submodules(model)]
    return [
        rule
        for rule in plan.fp32_modules
        if not any(matches(rule, name, module) for name, module in modules)
    ]


def _close_matches(rule: Rule, models: Sequence[nn.Module]) -> list[str]:
    """Returns the names or class names below the models that look most like ``rule``."""
    modules = [pair for model in models for pair in named_submodules(model)]
    if isinstance(rule, str):
        return difflib.get_close_matches(rule, [name for name, _ in modules], cutoff=0.5)
    kinds = sorted({type(module).__name__ for _, module in modules})
    return difflib.get_close_matches(rule.__name__, kinds, cutoff=0.5)


def _shared_across(model: nn.Module, plan: ModelPlan) -> tuple[str, str] | None:
    """Returns the names of a tensor that a fp32 and a cast module share: (fp32 one, cast one)."""
    kept = fp32_modules(model, plan)
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if module in kept:
            names.update({id(tensor): key for key, tensor in own_tensors(module, name)})
    for name, module in model.named_modules():
        if module not in kept:
            for key, tensor in own_tensors(module, name):
                if id(tensor) in names:
                    return names[id(tensor)], key
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.named_parameters():
        yield f"parameter {name}", param
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
