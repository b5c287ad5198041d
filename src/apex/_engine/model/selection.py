"""Which modules of a model stay in fp32."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex._engine.model.plan import ModelPlan

Rule = type[nn.Module] | str


def hooked_modules(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    """Returns the topmost modules that ``plan.fp32_modules`` names, each once."""
    chosen: dict[int, nn.Module] = {}
    names: list[str] = []
    for name, module in _below(model):
        if any(name.startswith(parent) for parent in names):
            continue
        if any(_matches(rule, name, module) for rule in plan.fp32_modules):
            names.append(name + ".")
            chosen[id(module)] = module
    return list(chosen.values())


def fp32_modules(model: nn.Module, plan: ModelPlan) -> set[nn.Module]:
    """Returns every module whose own parameters and buffers stay in fp32."""
    if not plan.casts_down:
        return set()
    tops = hooked_modules(model, plan)
    if plan.keep_batchnorm_fp32:
        tops += [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return {module for top in tops for module in top.modules()}


def castable_tensors(
    model: nn.Module, plan: ModelPlan
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yields every parameter and buffer once, with a name and the dtype that the plan gives it.

    A tensor that a fp32 module shares with another one is fp32 (and refused by ``check``).
    """
    if plan.param_dtype is None:
        return
    kept = fp32_modules(model, plan)
    seen: set[int] = set()
    # The kept ones first: the first to yield a shared tensor decides.
    for part in (True, False):
        for name, module in model.named_modules():
            if (module in kept) is not part:
                continue
            for key, tensor in _own_tensors(module):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _join(name, key), tensor, torch.float32 if part else plan.param_dtype


def shared_across(model: nn.Module, plan: ModelPlan) -> tuple[str, str] | None:
    """Returns the names of a tensor that a fp32 and a cast module share: (fp32 one, cast one)."""
    kept = fp32_modules(model, plan)
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if module in kept:
            names.update({id(t): _join(name, key) for key, t in _own_tensors(module)})
    for name, module in model.named_modules():
        if module not in kept:
            for key, tensor in _own_tensors(module):
                if id(tensor) in names:
                    return names[id(tensor)], _join(name, key)
    return None


def unmatched_rules(models: Sequence[nn.Module], plan: ModelPlan) -> list[Rule]:
    """Returns the entries of ``plan.fp32_modules`` that match no module of any model."""
    modules = [pair for model in models for pair in _below(model)]
    return [
        rule
        for rule in plan.fp32_modules
        if not any(_matches(rule, name, module) for name, module in modules)
    ]


def close_matches(rule: Rule, models: Sequence[nn.Module]) -> list[str]:
    """Returns the names or class names below the models that look most like ``rule``."""
    modules = [pair for model in models for pair in _below(model)]
    if isinstance(rule, str):
        return difflib.get_close_matches(rule, [name for name, _ in modules], cutoff=0.5)
    kinds = sorted({type(module).__name__ for _, module in modules})
    return difflib.get_close_matches(rule.__name__, kinds, cutoff=0.5)


def _below(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules below ``model`` under each of their names, parents first."""
    for name, module in model.named_modules(remove_duplicate=False):
        if name:  # the model itself in fp32 would be no conversion at all
            yield name, module


def _matches(rule: Rule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    return isinstance(module, rule)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
