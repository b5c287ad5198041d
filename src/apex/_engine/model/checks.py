"""Validates a model before conversion; raises before changing it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, jit, nn
from torch.nn import Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from apex._engine.model import proxy_class, sharding
from apex._engine.model.plan import (
    ModelPlan,
    Rule,
    fp32_modules,
    matches,
    named_submodules,
    planned_dtypes,
)
from apex._engine.model.state import module_behind, state_of
from apex._torch import dtensor, fsdp
from apex._torch.modules import named_modules, named_tensors, own_tensors


def check(
    model: nn.Module,
    plan: ModelPlan,
    *,
    op_casts: bool = False,
    allow_float64: bool = False,
    others: Sequence[nn.Module] = (),
) -> None:
    """Raises if ``model`` cannot be converted by ``plan``; changes nothing.

    Args:
        model: The model to convert.
        plan: The conversion.
        op_casts: Whether operators cast their inputs, which excludes float64 weights.
        allow_float64: Whether to accept such weights nevertheless.
        others: Further models of the same call; an entry of ``plan.fp32_modules`` needs to match in
            one of them only.

    Raises:
        TypeError: If ``model`` is not a ``torch.nn.Module``.
        RuntimeError: Under ``torch.inference_mode()``; if the model is converted and either plan
            casts its weights to 16 bits; if it is wrapped for parallel training, scripted, not
            materialized, in float64 where operators cast, or sharded in a way that conflicts with
            the plan's dtypes.
        ValueError: If ``plan.fp32_modules`` does not fit the model.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "amp.initialize was called under torch.inference_mode(), where parameters cannot be "
            "converted for later training. Call it before the block and only the model inside, or "
            "use torch.no_grad()."
        )
    for each in (model, *others):
        _check_kind(each, plan)
    fsdp.reshard(model)
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        is_param = isinstance(tensor, Parameter)
        label = f"{'parameter' if is_param else 'buffer'} {name}"
        _check_materialized(label, tensor)
        # A 0-d tensor combines with any dtype, like a Python number.
        if op_casts and not allow_float64 and is_param and tensor.dim():
            _check_precision(label, tensor)
    if any(tensor.is_inference() for tensor in tensors.values()):
        _check_no_inference_tensors(model, plan)
    _check_fp32_modules(model, plan, others)
    if dtensor.any_dtensor(tensors.values()):
        sharding.check(planned_dtypes(model, plan))


def check_restorable(model: nn.Module) -> None:
    """Raises RuntimeError if a converted model's parameters cannot be cast back to fp32."""
    state = state_of(model)
    if state is not None and state.plan.casts_down and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "amp.restore was called under torch.inference_mode(), where parameters cannot be "
            "converted for later training. Call it outside of the block, or in torch.no_grad()."
        )


def _check_kind(model: object, plan: ModelPlan) -> None:
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"amp.initialize got a model of type {kind}; it takes a torch.nn.Module, or a list or "
            "tuple of them."
        )
    module = module_behind(model)
    if not issubclass(type(module), nn.Module):
        raise TypeError(
            f"amp.initialize got a model of type {kind}, whose __class__ is that of a "
            "torch.nn.Module but whose modules() yields none. Pass the module itself."
        )
    state = state_of(model)
    if state is not None and (state.plan.casts_down or plan.casts_down):
        raise RuntimeError(
            f"amp.initialize got the model {kind}, which it has already prepared. Only a model "
            "that keeps fp32 weights (O0, O1, O4) can be prepared again, at one of these levels. "
            "For others, first call amp.restore(model, optimizer)."
        )
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise RuntimeError(
            f"amp.initialize got a model wrapped in {kind}; it takes the model itself. Call "
            f"amp.initialize first, then wrap the model that it returns in {kind}."
        )
    parts = named_modules(model)
    if any(map(fsdp.is_fsdp1, parts.values())):
        raise RuntimeError(
            f"amp.initialize got a model ({kind}) with FullyShardedDataParallel in it, which "
            "flattens parameters, so that amp cannot tell them apart. Use fully_shard from "
            f"torch.distributed.fsdp, which shards each parameter:\n{sharding.ORDER}"
        )
    if type(model).__module__.partition(".")[0] == "deepspeed":
        raise RuntimeError(
            f"amp.initialize got a model wrapped in DeepSpeed's {kind}, which does its own mixed "
            "precision. Enable fp16 or bf16 in its config instead, or drop DeepSpeed."
        )
    _check_not_scripted(module, parts if plan.casts_down else {})
    if module is not model:
        proxy_class.check(model)


def _check_not_scripted(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    if isinstance(model, jit.ScriptModule):
        raise RuntimeError(
            f"amp.initialize got a scripted model ({type(model).__name__}), whose compiled forward "
            "cannot cast. Pass the plain module; torch.compile and torch.jit.trace take the model "
            "amp returns."
        )
    for name, module in parts.items():
        if isinstance(module, jit.ScriptModule):
            raise RuntimeError(
                f"amp.initialize got a model whose {name} is scripted or traced, so that its "
                "state_dict cannot be converted to fp32. Put the plain module there, or use a "
                "level that keeps fp32 weights (O1, O4)."
            )


def _check_materialized(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise RuntimeError(
            f"amp.initialize got a model whose {name} is not initialized yet (a lazy module). Run "
            "one batch through the model first, so that its shapes are known."
        )
    if tensor.is_meta:
        raise RuntimeError(
            f"amp.initialize got a model whose {name} is on the meta device and has no values. "
            "Materialize the model first: model.to_empty(device=...), then load its weights."
        )


def _check_precision(name: str, tensor: Tensor) -> None:
    if tensor.dtype is torch.float64:
        raise RuntimeError(
            f"amp.initialize got a model whose {name} is float64; the op casts of O1 and O4 leave "
            "float64 as it is, and operators cannot combine it with 16-bit inputs. Call "
            "model.float() first, or use a level that converts the model (O0, O2, O3, O5)."
        )


def _check_no_inference_tensors(model: nn.Module, plan: ModelPlan) -> None:
    for name, tensor, dtype, _ in planned_dtypes(model, plan):
        if tensor.is_inference() and tensor.dtype is not dtype:
            raise RuntimeError(
                f"amp.initialize got a model whose {name} was created under "
                "torch.inference_mode(), so that its dtype cannot be changed. Create or load the "
                "model outside of the block, or under torch.no_grad()."
            )


def _check_fp32_modules(model: nn.Module, plan: ModelPlan, others: Sequence[nn.Module]) -> None:
    models = (model, *others) if plan.fp32_modules else ()
    modules = [pair for each in models for pair in named_submodules(each)]
    for rule in plan.fp32_modules:
        if any(matches(rule, name, module) for name, module in modules):
            continue
        shown = repr(rule) if isinstance(rule, str) else rule.__name__
        close = _close_matches(rule, modules)
        hint = f"Did you mean {', '.join(close)}?" if close else "No name or type is similar."
        raise ValueError(
            f"fp32_modules holds {shown}, which matches no submodule of {type(model).__name__}. "
            f"{hint} Names are those of model.named_modules()."
        )
    kept = fp32_modules(model, plan)
    parts = named_modules(model).items() if kept else ()
    names: dict[int, str] = {}
    for name, module in sorted(parts, key=lambda part: part[1] not in kept):  # those kept first
        for key, tensor in own_tensors(module, name):
            if module in kept:
                names[id(tensor)] = key
            elif id(tensor) in names:
                raise ValueError(
                    f"{names[id(tensor)]} stays in fp32 (by fp32_modules or keep_batchnorm_fp32), "
                    f"but is the same tensor as {key}, which is to be cast. Keep both in fp32, by "
                    "an entry in fp32_modules for the second module, or neither."
                )


def _close_matches(rule: Rule, modules: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Returns the submodule names or types most similar to ``rule``."""
    if isinstance(rule, str):
        return difflib.get_close_matches(rule, [name for name, _ in modules], cutoff=0.5)
    kinds = sorted({type(module).__name__ for _, module in modules})
    return difflib.get_close_matches(rule.__name__, kinds, cutoff=0.5)
