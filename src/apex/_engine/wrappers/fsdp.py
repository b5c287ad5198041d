"""``fully_shard`` (FSDP2): ranks hold shards of parameters, gradients and optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from apex._torch import fsdp


class Shards:
    """The parameter groups of ``fully_shard`` in a session's models.

    Attributes:
        groups: Weak references to them.
    """

    def __init__(self) -> None:
        """Starts without groups."""
        self.groups: list[weakref.ref[object]] = []

    def add(self, model: nn.Module) -> None:
        """Adds the groups of a model."""
        self.groups += map(weakref.ref, fsdp.param_groups(model))

    def reduces(self) -> bool:
        """Returns whether ranks reduce the gradients of a pass that begins now."""
        return not fsdp.defers_reduction(group() for group in self.groups)

    def multiply_unsent(self, scale: Tensor | float, *, sends: bool) -> None:
        """Multiplies what ranks have yet to share by a scale, for a pass that ``sends`` it."""
        fsdp.multiply_unsent([group() for group in self.groups], scale, sends=sends)

    def check(self, models: Iterable[nn.Module], *, drifts: bool) -> None:
        """Raises RuntimeError if a model was sharded after it was prepared with an optimizer.

        Args:
            models: The models.
            drifts: Whether there is state that ranks with flat parameters (FSDP1) do not share.
        """
        known = [group() for group in self.groups]
        for model in models:
            if drifts and fsdp.is_flattened(model):
                raise RuntimeError(
                    "FullyShardedDataParallel flattened the parameters of a prepared model. Ranks "
                    "would part, as they do not share overflows, and masters keep their shapes. "
                    "Use opt_level='O4', or fully_shard(model) from torch.distributed.fsdp before "
                    "the optimizer and amp.initialize."
                )
            for group in fsdp.param_groups(model):
                if group not in known:
                    raise RuntimeError(
                        "fully_shard was called after amp.initialize, which replaces parameters: "
                        "the optimizer holds those from before and trains nothing. Call "
                        "fully_shard first, then create the optimizer, and call amp.initialize "
                        "last, at O1, O4, or O0 with a MixedPrecisionPolicy."
                    )
