"""Validates a model before conversion; raises before changing it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from inspect import Parameter

import torch
from torch import Tensor, jit, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.arguments import parameters_of
from apex._core.param_groups import params_of
from apex._engine import master_table
from apex._engine.conversion.plan import ModelPlan, matches, named_submodules, planned_dtypes
from apex._engine.conversion.state import state_of
from apex._torch import dtensor, fsdp


def check(models: Sequence[nn.Module], plan: ModelPlan) -> None:
    """Raises if a model cannot be converted by ``plan``; changes nothing.

    Args:
        models: The models to convert; a name or type in ``plan`` needs to match in one of them.
        plan: The conversion.

    Raises:
        RuntimeError: Under ``torch.inference_mode()``; if the model is converted and either plan
            casts its weights to 16 bits; if it is wrapped for parallel training, scripted, on
            the meta device, in float64 where operators cast, or sharded in a way that conflicts
            with the plan's dtypes.
        ValueError: If ``plan`` names what no model has.
    """
    refuse_inference_mode("amp.initialize")
    for model in models:
        _check_model(model, plan)
        # A forward pass without a backward pass leaves gathered parameters in place of its own.
        for module in fsdp.sharded_modules(model):
            module.reshard()  # type: ignore[operator]
        for name, tensor, dtype in planned_dtypes(model, plan):
            fault = _fault(tensor, dtype, plan)
            if fault is not None:
                raise RuntimeError(f"amp.initialize got a model whose {name} is {fault}")
    _check_names(plan, models)


def refuse_inference_mode(call: str) -> None:
    """Raises RuntimeError under ``torch.inference_mode()``; ``call`` names the caller."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{call} was called under torch.inference_mode(), where parameters cannot be converted "
            "for later training. Call it before the block, or use torch.no_grad()."
        )


def _check_model(model: nn.Module, plan: ModelPlan) -> None:
    """Raises RuntimeError for a model that is prepared, wrapped or scripted."""
    kind = type(model).__name__
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
    if fsdp.is_flattened(model):
        raise RuntimeError(
            f"amp.initialize got a model ({kind}) whose parameters FullyShardedDataParallel has "
            "flattened. Use fully_shard(model) from torch.distributed.fsdp, then create the "
            "optimizer, then call amp.initialize."
        )
    for name, module in model.named_modules():
        if isinstance(module, jit.ScriptModule) and (plan.casts_down or not name):
            raise RuntimeError(
                f"amp.initialize got a scripted model ({kind}), or one whose {name or 'root'} is "
                "scripted: compiled code cannot cast. Pass the plain module; torch.compile and "
                "torch.jit.trace take the model amp returns."
            )


def _fault(tensor: Tensor, planned: torch.dtype, plan: ModelPlan) -> str | None:
    """Returns what makes a parameter or buffer unfit, with the fix."""
    is_cast = planned is not tensor.dtype
    if tensor.is_meta:
        return (
            "on the meta device and has no values. Materialize the model first: "
            "model.to_empty(device=...), then load its weights."
        )
    if tensor.is_inference() and is_cast:
        return "made under torch.inference_mode(). Make or load the model under torch.no_grad()."
    low = planned if plan.casts_down and planned in dtypes.LOW_PRECISION else None
    if dtensor.is_dtensor(tensor) and dtypes.is_castable(tensor) and (low or is_cast):
        return (
            "a DTensor (fully_shard, tensor parallel), which amp does not cast. For 16 bits, "
            f"fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype={low})) casts, and "
            "keeps fp32 shards for amp.initialize(..., opt_level='O0'); with fp16, add "
            "loss_scale='dynamic'. Shard an fp32 model: model.float() before fully_shard. After "
            "parallelize_module alone, use opt_level='O1' or 'O4'."
        )
    was_cast = master_table.pair_of(tensor) is not None or tensor in master_table.exact
    if is_cast and was_cast and dtypes.is_low_precision(tensor):
        return (
            f"cast to {tensor.dtype} by an earlier amp.initialize call, whose model shares it. "
            "Use that call's opt_level, or call amp.restore(model, optimizer) for its model first. "
            "If its model is gone, pass copy.deepcopy(part), which is plain."
        )
    # A 0-d tensor combines with any dtype, like a Python number.
    is_double = isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float64
    if plan.widen_low and is_double and tensor.dim():
        return (
            "float64; the op casts of O1 and O4 leave float64 as it is, and operators cannot "
            "combine it with 16-bit inputs. Call model.float() first, or use a level that converts "
            "the model (O0, O2, O3, O5)."
        )
    return None


def _check_names(plan: ModelPlan, models: Sequence[nn.Module]) -> None:
    """Raises ValueError if ``plan`` names a module, buffer or argument that no model has."""
    for name in ("fp32_modules", "fp32_inputs", "fp32_buffers"):
        if getattr(plan, name) and not plan.casts_down:
            raise ValueError(
                f"{name} says what stays in fp32 while the rest is cast, but this level does not "
                "cast the model to a 16-bit type. Use it at O2, O3 or O5, or leave it out."
            )
    modules: list[tuple[str, nn.Module]] = []
    buffers: list[str] = []
    for model in models:
        modules += named_submodules(model)
        buffers += dict(model.named_buffers())
    for rule in plan.fp32_modules:
        is_known = any(matches(rule, name, module) for name, module in modules)
        if not is_known:
            known: list[str] = []
            for name, module in modules:
                known.append(name if isinstance(rule, str) else type(module).__name__)
            _refuse("fp32_modules", rule, "matches no submodule", known)
    for rule in plan.fp32_buffers:
        is_known = any(fnmatchcase(name, str(rule)) for name in buffers)
        if not is_known:
            _refuse("fp32_buffers", rule, "matches no buffer", buffers)
    _check_inputs(plan, models)


def _check_inputs(plan: ModelPlan, models: Sequence[nn.Module]) -> None:
    """Raises ValueError if ``plan`` names an argument that no model's forward takes."""
    params: list[Parameter] = []
    for model in models:
        params += parameters_of(model.forward).values()
    kinds = {param.kind for param in params}
    collecting = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # ``*args`` and ``**kwargs``
    names = [param.name for param in params if param.kind not in collecting]
    unlisted: tuple[type, ...] = ()
    if Parameter.VAR_KEYWORD in kinds:
        unlisted += (str,)
    if Parameter.VAR_POSITIONAL in kinds:
        unlisted += (int,)
    for rule in plan.fp32_inputs:
        if rule not in names and not isinstance(rule, unlisted):
            _refuse("fp32_inputs", rule, "is no argument of the model's forward", names)


def _refuse(argument: str, rule: object, how: str, known: Iterable[str]) -> None:
    """Raises ValueError for a rule that names nothing, with the names that are close to it."""
    shown = rule.__name__ if isinstance(rule, type) else repr(rule)
    names = sorted(set(known))
    close = difflib.get_close_matches(shown.strip("'"), names, cutoff=0.5)
    if close:
        hint = f"Did you mean {', '.join(close)}?"
    else:
        hint = f"Available: {', '.join(names[:8]) or 'none'}."
    raise ValueError(f"{argument} holds {shown}, which {how}. {hint}")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises RuntimeError if the optimizer cannot step the DTensors that it holds."""
    if getattr(optimizer, "steps_dtensors", True):
        return
    if any(map(dtensor.is_dtensor, params_of(optimizer))):
        raise RuntimeError(
            f"amp.initialize got {type(optimizer).__name__} with DTensor parameters (fully_shard, "
            "tensor parallel), but its update rule needs whole tensors. Use FusedAdam or FusedLAMB "
            "from apex.optimizers, or an optimizer from torch.optim."
        )
