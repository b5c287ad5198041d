"""How DistributedDataParallel communicates a model's gradients, as seen in forward passes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

SENDS_LATER = "_apex_sends_later"
"""Key in the ``__dict__`` of a wrapper that sends gradients without torch's reducer, after a pass.

It is true while a forward pass runs that will send them.
"""

_KEPT = "apex.kept"
"""Key in the metadata of nodes."""


def active_wrapper() -> DistributedDataParallel | None:
    """Returns the innermost wrapper whose forward pass is running, if any."""
    return DistributedDataParallel._active_ddp_module  # private in torch


def sends(wrapper: DistributedDataParallel) -> bool:
    """Returns whether the wrapper sends the gradients of a forward pass that begins now."""
    return bool(wrapper.require_backward_grad_sync or wrapper.__dict__.get(SENDS_LATER))


def sent_params(wrapper: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """Yields the parameters whose gradients a wrapper averages, if they require one.

    torch compares ``parameters_to_ignore`` with names that it joins by a dot: ``.own`` in the root.
    """
    for prefix, module in wrapper.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if f"{prefix}.{name}" not in wrapper.parameters_to_ignore:
                yield param


def live_wrappers() -> list[DistributedDataParallel]:
    """Returns all wrappers of this process, in any order, by a walk through all objects."""
    objects = gc.get_objects()
    return [each for each in objects if issubclass(type(each), DistributedDataParallel)]


def broadcast(wrapper: DistributedDataParallel, tensors: list[Tensor]) -> None:
    """Broadcasts tensors from the first rank of the wrapper's group, as it does its parameters."""
    # Private in torch: a collective for each 250 MiB.
    broadcast_all = distributed._broadcast_coalesced  # type: ignore[attr-defined]
    broadcast_all(wrapper.process_group, tensors, wrapper.broadcast_bucket_size, 0)


def is_unfinished(wrapper: DistributedDataParallel) -> bool:
    """Returns whether a backward pass has reached only some of the parameters of its forward.

    The wrapper writes the averages once a pass reaches the others.
    """
    try:
        wrapper._check_reducer_finalized()  # type: ignore[no-untyped-call]  # private in torch
    except RuntimeError:
        return True
    return False


def _lacks_hooks(wrapper: DistributedDataParallel) -> bool:
    """Returns whether a parameter was cast after the wrapper was made.

    With the dtype of a parameter autograd drops the node that adds to its gradient, and with it the
    wrapper's hook, which sends the gradient. Otherwise the wrapper keeps the node alive.
    """
    # Private in torch: the parameters, and the reducer, which has the hooks. Without them, as in a
    # wrapper of wrappers, or where it sends later or casts itself, the answer is no.
    attributes = vars(wrapper)
    casts = attributes.get("mixed_precision") is not None
    if attributes.get("reducer") is None or SENDS_LATER in attributes or casts:
        return False
    for param in attributes.get("_module_parameters", ()):
        if param.requires_grad:
            _metadata(param)[_KEPT] = True
            is_kept = _metadata(param).pop(_KEPT, False)
            if not is_kept:
                return True
    return False


def _metadata(param: Tensor) -> Any:
    """Returns what is noted on the node that adds to a parameter's gradient, and lives with it."""
    return get_gradient_edge(param).node.metadata


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Returns whether the wrapper is inside ``join``, where ranks may have no batch left.

    Do not add collectives there: ranks without a batch match only the wrapper's own.
    """
    # Private in torch (``Joinable``); a wrapper without it cannot join.
    config = wrapper.__dict__.get("_join_config")
    return bool(config is not None and config.enable)


def delays_all_reduce(wrapper: DistributedDataParallel) -> bool:
    """Returns whether the wrapper averages some gradients by itself, in a buffer that they are."""
    # Private in torch. Without it, such a wrapper is not refused.
    return bool(wrapper.__dict__.get("_delay_all_reduce_params"))


def rebuild_reducer(wrapper: Any) -> None:
    """Recreates the reducer of a wrapper whose parameters were cast since, with other buckets.

    In torch, only restoring the state of a wrapper creates a new reducer.
    """
    if _lacks_hooks(wrapper):
        state = vars(wrapper)  # with its own process group
        registered = state.get("_comm_hooks", [])
        wrapper.__setstate__({**state, "_comm_hooks": []})
        if not wrapper._comm_hooks:  # apex's wrapper has registered its own
            for hook, state_of_hook in registered:
                wrapper.register_comm_hook(state_of_hook, hook)
