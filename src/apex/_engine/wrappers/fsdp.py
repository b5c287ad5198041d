"""``fully_shard`` (FSDP2): ranks hold shards of parameters, gradients and optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from apex._torch import dtensor, fsdp
from apex._torch.modules import params_in

groups = weakref.WeakSet[Any]()
"""The groups of parameters in prepared models that are gathered together."""

_unsharded = weakref.WeakSet[nn.Module]()
"""The prepared models that had no DTensor at ``initialize``."""


def add(model: nn.Module) -> None:
    """Adds a prepared model."""
    groups.update(fsdp.param_groups(model))
    if not dtensor.any_dtensor(params_in(model)):
        _unsharded.add(model)


def drop(model: nn.Module) -> None:
    """Forgets a model that becomes plain."""
    groups.difference_update(fsdp.param_groups(model))
    _unsharded.discard(model)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a model, or a part of it, is sharded."""
    return bool(fsdp.param_groups(model))


def reduces(params: Sequence[Tensor]) -> bool:
    """Returns whether ranks reduce the gradients of parameters in a pass that begins now."""
    return not fsdp.defers_reduction(groups, params)


def multiply_unsent(scale: Tensor | float, *, sends: bool) -> None:
    """Multiplies what ranks have yet to share by a scale, for a pass that ``sends`` it."""
    fsdp.multiply_unsent(groups, scale, sends=sends)


def check(models: Iterable[nn.Module], *, drifts: bool) -> None:
    """Raises RuntimeError if a model was sharded after it was prepared with an optimizer.

    Args:
        models: The models.
        drifts: Whether there is state that ranks with flat parameters (FSDP1) do not share.
    """
    for model in models:
        if drifts and fsdp.is_flattened(model):
            raise RuntimeError(
                "FullyShardedDataParallel flattened the parameters of a prepared model. Ranks "
                "would drift apart: they do not share overflows, and masters are not flattened. "
                "Use opt_level='O4', or fully_shard(model) from torch.distributed.fsdp before "
                "the optimizer and amp.initialize."
            )
        is_late = not groups.issuperset(fsdp.param_groups(model))
        if is_late or (model in _unsharded and dtensor.any_dtensor(params_in(model))):
            raise RuntimeError(
                "fully_shard or parallelize_module was called after amp.initialize. It replaces "
                "the model's parameters, so the optimizer holds those from before and does not "
                "train them. Call it first, then create the optimizer, and call amp.initialize "
                "last, at O1, O4, or O0 (with a MixedPrecisionPolicy for fully_shard)."
            )
