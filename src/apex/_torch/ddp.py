"""What DistributedDataParallel does with a model's gradients, as its forward pass shows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

# The wrapper whose forward runs now. torch has no public name for it; without it a wrapper is never
# seen, and amp does as for models whose gradients a script averages itself.
_KNOWS_ACTIVE = "_active_ddp_module" in vars(DistributedDataParallel)

SENDS_LATER = "_apex_sends_later"
"""Set in the ``__dict__`` of a wrapper that keeps torch's reducer out of its forward pass."""


@dataclass(frozen=True)
class Communication:
    """What becomes of the gradients of one backward pass.

    Attributes:
        sends: Whether they are averaged over the ranks; False while ``no_sync`` accumulates.
        in_buckets: Whether they share memory with the buckets they are sent in.
    """

    sends: bool = True
    in_buckets: bool = False


ALONE = Communication()
"""Where no wrapper has been seen: gradients are whole after every pass, or a script's concern."""


def active_wrapper() -> DistributedDataParallel | None:
    """Returns the wrapper whose forward pass runs now, of the innermost one if several."""
    if not _KNOWS_ACTIVE:
        return None
    return DistributedDataParallel._active_ddp_module


class Wrappers:
    """The wrappers that models have been seen under.

    Attributes:
        seen: Whether there has been any.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.seen = False
        self._traced: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._sends: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._of: weakref.WeakKeyDictionary[object, list[weakref.ref[DistributedDataParallel]]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, wrapper: DistributedDataParallel, *, traced: bool = False) -> None:
        """Takes note of a forward pass, and whether its gradients are to be sent.

        Args:
            wrapper: The wrapper whose forward pass runs.
            traced: Whether it is compiled: later ones will not be noted.
        """
        self.seen = True
        if traced:
            self._traced.add(wrapper)
        new = wrapper not in self._sends
        if new:
            self.forget_users()
        if new or torch.is_grad_enabled():
            self._sends[wrapper] = _sends(wrapper)

    def forget_users(self) -> None:
        """Looks up anew who uses which wrapper."""
        self._of.clear()

    def of(
        self, user: object, params: Callable[[], Iterable[Tensor]]
    ) -> list[DistributedDataParallel]:
        """Returns the wrappers that hold any of ``params()``, looked up once for each ``user``.

        In the order in which they were first noted: every rank is to send messages in the same.
        """
        if user not in self._of:
            wanted = {id(param) for param in params()}
            self._of[user] = [
                weakref.ref(wrapper)
                for wrapper in self._sends
                if not wanted.isdisjoint(sent_params(wrapper))
            ]
        return [wrapper for ref in self._of[user] if (wrapper := ref()) is not None]

    def communication(self, wrappers: Iterable[DistributedDataParallel]) -> Communication:
        """Returns what becomes of gradients that these wrappers send."""
        return Communication(
            sends=all(
                # Where no forward pass has told: by what holds in the block of the backward pass.
                _sends(wrapper) if wrapper in self._traced else self._sends.get(wrapper, True)
                for wrapper in wrappers
            ),
            in_buckets=any(wrapper.gradient_as_bucket_view for wrapper in wrappers),
        )


def _sends(wrapper: DistributedDataParallel) -> bool:
    return bool(wrapper.require_backward_grad_sync or wrapper.__dict__.get(SENDS_LATER, False))


def sent_params(wrapper: DistributedDataParallel) -> set[int]:
    """Returns the ids of the parameters that the wrapper keeps alike on all ranks."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    return {id(param) for name, param in named if name not in ignored}


def joins(wrapper: DistributedDataParallel) -> bool:
    """Returns whether the wrapper is in a ``join``, where ranks may be without a batch.

    No message may be added there: ranks without a batch answer those of the wrapper only.
    """
    # Private in torch (``Joinable``); a wrapper without it cannot join.
    config = wrapper.__dict__.get("_join_config")
    return bool(config is not None and config.enable)


def share(tensors: Sequence[Tensor], wrapper: DistributedDataParallel) -> None:
    """Gives every rank of the wrapper's group the values of the group's first rank.

    Every rank has to call it, with tensors of the same shapes.
    """
    group = wrapper.process_group
    source = distributed.get_global_rank(group, 0)
    sent = [distributed.broadcast(t, source, group=group, async_op=True) for t in tensors]
    for work in sent:
        if work is not None:
            work.wait()
