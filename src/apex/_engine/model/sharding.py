"""What ``fully_shard`` (FSDP2) has made of a model, and what amp cannot do with that.

Note [fully_shard's state]: torch has no public way to ask a sharded module for its parameter
groups, so they are read from the state it keeps, here only. Where another torch keeps them
elsewhere, none are found: then the checks below are torch's own, later and in its words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from apex._core import dtypes
from apex._torch import dtensor

_MODULE = "torch.distributed.fsdp"
"""Looked up where a script has imported it, for ``import apex.amp`` is to stay quick."""

ORDER = (
    "    fully_shard(model)\n"
    "    optimizer = Optimizer(model.parameters())\n"
    "    model, optimizer = amp.initialize(model, optimizer)"
)


def is_wrapped(module: nn.Module) -> bool:
    """Returns whether ``module`` is a FullyShardedDataParallel (FSDP1)."""
    fsdp = sys.modules.get(_MODULE)
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def param_groups(model: nn.Module) -> list[Any]:
    """Returns the groups of parameters that ``fully_shard`` gathers together, each once.

    See Note [fully_shard's state].
    """
    found: dict[int, Any] = {}
    for module in _sharded_modules(model):
        state = _call(module, "_get_fsdp_state")
        several = getattr(state, "_fsdp_param_groups", None)
        one = getattr(state, "_fsdp_param_group", None) if several is None else None
        for group in [one] if one is not None else several or ():
            found[id(group)] = group
    return list(found.values())


def reshard(model: nn.Module) -> None:
    """Makes a sharded model hold its own parameters again.

    After a forward pass without a backward it holds those that it has gathered for it.
    """
    for module in _sharded_modules(model):
        _call(module, "reshard")


def keeps_back(groups: Iterable[Any]) -> bool:
    """Returns whether any group keeps its gradients back to sum them with those of a later pass.

    That is after ``model.set_requires_gradient_sync(False)``.
    """
    return any(getattr(group, "reduce_grads", True) is False for group in groups)


def check_order(models: Iterable[nn.Module], params: Sequence[Tensor]) -> None:
    """Raises where ``fully_shard`` came after ``initialize`` and left stale parameters.

    Args:
        models: The models of a session.
        params: What they held then and the session's optimizers train.

    Raises:
        RuntimeError: If the optimizers train parameters that ``fully_shard`` has replaced.
    """
    plain = [param for param in params if not dtensor.is_dtensor(param)]
    sharded = [model for model in models if plain and any(_sharded_modules(model))]
    if not sharded:
        return
    present = {id(param) for model in models for param in model.parameters()}
    if any(id(param) not in present for param in plain):
        raise RuntimeError(
            "fully_shard was called after amp.initialize. It replaced the model's parameters, so "
            f"the optimizer steps ones that the model no longer has. The order is\n{ORDER}"
        )


def check(
    model: nn.Module, planned: Iterable[tuple[str, Tensor, torch.dtype]], remedy: str
) -> None:
    """Raises where the parameters of a sharded model cannot get their dtypes; changes nothing.

    Args:
        model: A model whose parameters are to be cast.
        planned: Name, tensor and dtype of everything that is to be cast.
        remedy: What lets parameters that stay in fp32 share a group with ones that are cast.

    Raises:
        RuntimeError: With the reason.
    """
    target = {}
    for name, tensor, dtype in planned:
        if dtypes.is_castable(tensor):
            target[id(tensor)] = (name, dtype)
            if tensor.dtype is not dtype and dtensor.is_dtensor(tensor):
                _check_hooks(name, tensor)
    for group in param_groups(model):
        _check_not_run(model, group)
        params = [param.sharded_param for param in group.fsdp_params]
        trained = [target[id(p)] for p in params if id(p) in target and p.requires_grad]
        _check_one_dtype(trained, remedy)
        _check_policy(group, trained)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises where the optimizer's step does not take the DTensors that it has.

    Raises:
        RuntimeError: With the reason.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(map(dtensor.is_dtensor, params)):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, SGD | Adagrad) and any(g.get("fused") for g in optimizer.param_groups):
        raise RuntimeError(
            f"amp.initialize got {name}(fused=True) with DTensor parameters (fully_shard, tensor "
            "parallel), which torch's fused kernels take in Adam and AdamW only. Leave fused=True "
            f"out of {name}."
        )
    if not getattr(optimizer, "steps_dtensors", True):
        raise RuntimeError(
            f"amp.initialize got {name} with DTensor parameters (fully_shard, tensor parallel), "
            "whose rule is written for whole tensors. Use FusedAdam or FusedLAMB of "
            "apex.optimizers, or an optimizer of torch.optim."
        )


def check_restorable(model: nn.Module) -> None:
    """Raises where ``fully_shard`` no longer takes other dtypes, as those of ``amp.restore``.

    Raises:
        RuntimeError: If the model has run.
    """
    for group in param_groups(model):
        if _has_run(group):
            raise RuntimeError(
                f"amp.restore got the model {type(model).__name__}, whose 16-bit parameters "
                "fully_shard has gathered already: its buffers keep their dtype for the model's "
                "life. Take model.state_dict(), which is in fp32, and load it into a new model."
            )


def _check_hooks(name: str, param: Tensor) -> None:
    # A DTensor's dtype changes by torch.utils.swap_tensors, which leaves hooks behind.
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            f"amp.initialize got a model whose parameter {name} is a DTensor with gradient hooks, "
            "which a change of its dtype would lose. Register them after amp.initialize, or use "
            "opt_level 'O1' or 'O4', which leave parameters as they are."
        )


def _check_not_run(model: nn.Module, group: Any) -> None:
    if _has_run(group):
        raise RuntimeError(
            f"amp.initialize got the model {type(model).__name__}, which has run already after "
            "fully_shard: its buffers keep their dtype for the model's life. Call amp.initialize "
            "before the first forward pass, or use opt_level 'O1' or 'O4', which cast no "
            "parameters."
        )


def _check_one_dtype(trained: Sequence[tuple[str, torch.dtype]], remedy: str) -> None:
    by_dtype = {dtype: name for name, dtype in trained}
    if len(by_dtype) > 1:
        listed = " and ".join(f"{name} ({dtypes.name(d)})" for d, name in by_dtype.items())
        raise RuntimeError(
            f"amp.initialize got a model in which fully_shard gathers {listed} together; it takes "
            "one dtype a group. Call fully_shard on the modules that stay in fp32 by themselves, "
            f"before their parents, or let them be cast: {remedy}."
        )


def _check_policy(group: Any, trained: Sequence[tuple[str, torch.dtype]]) -> None:
    wanted = getattr(getattr(group, "mp_policy", None), "param_dtype", None)
    for name, dtype in trained:
        if wanted not in (None, dtype):
            raise RuntimeError(
                f"amp.initialize is to keep {name} in {dtypes.name(dtype)}, but fully_shard was "
                f"told to compute in {dtypes.name(wanted)} (MixedPrecisionPolicy.param_dtype). "
                "Leave param_dtype out; reduce_dtype may stay. Or use opt_level 'O1' or 'O4'."
            )


def _has_run(group: Any) -> bool:
    return any(getattr(param, "all_gather_outputs", None) for param in group.fsdp_params)


def _sharded_modules(model: nn.Module) -> Iterator[nn.Module]:
    fsdp = sys.modules.get(_MODULE)
    if fsdp is not None:
        yield from (m for m in model.modules() if isinstance(m, fsdp.FSDPModule))


def _call(module: nn.Module, name: str) -> Any:
    method = getattr(module, name, None)
    return None if method is None else method()
