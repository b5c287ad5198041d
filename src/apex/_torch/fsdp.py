"""State of ``fully_shard`` (FSDP2) that has no public interface in torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from apex._torch.dispatcher import TORCH_VERSION
from apex._torch.modules import modules_in, params_in

_MODULE = "torch.distributed.fsdp"
"""Used only if a script has imported it, to keep ``import apex.amp`` fast."""


def is_flattened(model: nn.Module) -> bool:
    """Returns whether FullyShardedDataParallel (FSDP1) has flattened parameters of a model."""
    return any(getattr(param, "_fsdp_flattened", False) for param in params_in(model))


def sharded_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that ``fully_shard`` was called on."""
    fsdp = sys.modules.get(_MODULE)
    if fsdp is not None:
        yield from (m for m in modules_in(model) if isinstance(m, fsdp.FSDPModule))


def _states(model: nn.Module) -> Iterator[Any]:
    for module in sharded_modules(model):
        yield module._get_fsdp_state()  # type: ignore[operator]


def param_groups(model: nn.Module) -> list[Any]:
    """Returns the groups of parameters that are gathered together."""
    found: list[Any] = []
    for state in _states(model):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older releases have one, or none
            group = state._fsdp_param_group
            groups = [] if group is None else [group]
        found += groups
    return found


def casts(model: nn.Module) -> bool:
    """Returns whether ``fully_shard`` casts arguments, parameters or outputs of any module."""
    for state in _states(model):
        policy = state._mp_policy
        if policy.param_dtype or policy.output_dtype:
            return True
    return False


def multiply_unsent(groups: Iterable[Any], factor: Tensor | float, *, sends: bool) -> None:
    """Multiplies the gradients that passes have left, and that ranks have yet to reduce.

    They become fp32; or if a pass that ``sends`` follows, the dtype in which ranks reduce them.
    """
    for group in groups:
        partial = group._partial_reduce_output  # replicas have yet to add it
        if partial is not None:
            group._partial_reduce_output = factor * partial.float()
        for param in group.fsdp_params:
            whole: Any = getattr(param, "_unsharded_param", None)  # None before the first forward
            grad = getattr(param, "unsharded_accumulated_grad", None)
            if grad is None and whole is not None:
                grad = whole.grad
            if grad is not None:
                whole.grad = None
                product = factor * grad.float()
                if TORCH_VERSION < (2, 15):
                    dtype = param.reduce_dtype or whole.dtype
                    param.unsharded_accumulated_grad = product.to(dtype) if sends else product
                else:  # passes add to the gathered parameter's own gradient
                    whole.grad_dtype = param.unsharded_grad_dtype if sends else None
                    whole.grad = product.to(whole.grad_dtype or product.dtype)


def defers_reduction(groups: Iterable[Any], params: Iterable[Tensor]) -> bool:
    """Returns whether a group of the parameters leaves a reduction, or a part of it, to later.

    ``model.set_requires_gradient_sync(False)`` causes this, and on a mesh with replicas
    ``model.set_requires_all_reduce(False)``.
    """
    asked = {*map(id, params)}
    for group in groups:
        own = [id(param.sharded_param) for param in group.fsdp_params]
        if asked.isdisjoint(own):
            continue
        if not group.reduce_grads:
            return True
        has_replicas = getattr(group.mesh_info, "replicate_mesh_dim", None) is not None
        if has_replicas and not group.all_reduce_grads:
            return True
    return False
