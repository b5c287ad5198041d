"""Validates a model before conversion; raises before changing it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

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
    planned_dtypes,
)
from apex._engine.model.state import module_behind, state_of
from apex._torch import dtensor, fsdp
from apex._torch.modules import named_tensors, own_tensors


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
        others: Further models of the same call; a name or type in ``plan`` needs to match in one of
            them only.

    Raises:
        TypeError: If ``model`` is not a ``torch.nn.Module``.
        RuntimeError: Under ``torch.inference_mode()``; if the model is converted and either plan
            casts its weights to 16 bits; if it is wrapped for parallel training, scripted, not
            materialized, in float64 where operators cast, or sharded in a way that conflicts with
            the plan's dtypes.
        ValueError: If ``plan`` names what no model has.
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
    _check_names(plan, (model, *others))
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
    if any(map(fsdp.is_fsdp1, model.modules())):
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
    _check_not_scripted(module, plan)
    if module is not model and plan.casts_down:
        raise TypeError(
            f"amp.initialize got a model of type {kind}, a proxy that stands for a "
            "torch.nn.Module. A level that casts the model to 16 bits cannot cast what the proxy "
            "itself computes. Pass the module inside it, or use opt_level O1 or O4."
        )


def _check_not_scripted(model: nn.Module, plan: ModelPlan) -> None:
    if isinstance(model, jit.ScriptModule):
        raise RuntimeError(
            f"amp.initialize got a scripted model ({type(model).__name__}), whose compiled forward "
            "cannot cast. Pass the plain module; torch.compile and torch.jit.trace take the model "
            "amp returns."
        )
    for name, module in model.named_modules() if plan.casts_down else ():
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
    for name, tensor, dtype in planned_dtypes(model, plan):
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
        if not any(matches(rule, name, module) for name, module in modules):
            shown = repr(rule) if isinstance(rule, str) else rule.__name__
            hint = _hint(rule, modules)
            raise ValueError(
                f"fp32_modules holds {shown}, which matches no submodule of "
                f"{type(model).__name__}. {hint} Names are those of model.named_modules()."
            )
    kept = fp32_modules(model, plan)
    names: dict[int, str] = {}
    # Those kept come first.
    parts = sorted(model.named_modules(), key=lambda part: part[1] not in kept) if kept else ()
    for name, module in parts:
        for key, tensor in own_tensors(module, name):
            if module in kept:
                names[id(tensor)] = key
            elif id(tensor) in names:
                raise ValueError(
                    f"{names[id(tensor)]} stays in fp32 (by fp32_modules or keep_batchnorm_fp32), "
                    f"but is the same tensor as {key}, which is to be cast. Keep both in fp32, by "
                    "an entry in fp32_modules for the second module, or neither."
                )


def _hint(rule: Rule, modules: Sequence[tuple[str, nn.Module]]) -> str:
    """Returns a sentence with the submodule names or types most similar to ``rule``."""
    if isinstance(rule, str):
        return _similar(rule, [name for name, _ in modules])
    return _similar(rule.__name__, {type(module).__name__ for _, module in modules})


def _similar(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), cutoff=0.5)
    return f"Did you mean {', '.join(close)}?" if close else "No name or type is similar."


def _check_names(plan: ModelPlan, models: Sequence[nn.Module]) -> None:
    """Raises ValueError if ``plan`` names an argument or buffer that no model has."""
    buffers = {name for model in models for name, _ in model.named_buffers()}
    for rule in plan.fp32_buffers:
        if not any(fnmatchcase(name, rule) for name in buffers):
            raise ValueError(
                f"fp32_buffers holds {rule!r}, which matches no buffer. {_similar(rule, buffers)} "
                "Names are those of model.named_buffers()."
            )
    if plan.fp32_inputs:
        params = [p for m in models for p in inspect.signature(m.forward).parameters.values()]
        names = {p.name for p in params if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        unknown = set(plan.fp32_inputs) - names
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in params):
            name = min(unknown)
            raise ValueError(
                f"fp32_inputs holds {name!r}, which is no argument of the model's forward. "
                f"{_similar(name, names)} It takes: {', '.join(sorted(names))}."
            )
