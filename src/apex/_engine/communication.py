"""Tracks DistributedDataParallel: which gradients are sent, and masters equal on all ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from apex._core import dtypes
from apex._core.living import Living
from apex._engine.binding import Binding
from apex._engine.masters import Pair
from apex._engine.scaler import Scaler
from apex._torch import ddp
from apex._torch.dynamo import untraced

_log = logging.getLogger("apex")


class Communicator:
    """The DistributedDataParallel wrappers that a session's models run under."""

    def __init__(self, scalers: Sequence[Scaler]) -> None:
        """Starts without wrappers.

        Args:
            scalers: The session's own list, which scripts may change.
        """
        self._scalers = scalers
        self._seen = False
        self._traced: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        # In the order of their first forward passes, so that all ranks communicate alike.
        self._sends: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._of: weakref.WeakKeyDictionary[Binding, list[weakref.ref[DistributedDataParallel]]] = (
            weakref.WeakKeyDictionary()
        )
        self._join_warned = False
        self._checked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._shared: weakref.WeakSet[Pair] = weakref.WeakSet()
        _living.add(self)

    def note(self, wrapper: DistributedDataParallel, *, traced: bool = False) -> None:
        """Records that a model's forward pass begins under a wrapper, and if that sends gradients.

        ``traced`` tells whether the pass is being compiled, or runs in compiled code.

        Raises:
            RuntimeError: If the wrapper was made before its parameters were cast, so that it would
                train each rank on gradients of its own.
        """
        has_grad = torch.is_grad_enabled()
        if has_grad and wrapper not in self._checked:
            _check_order(wrapper)
            self._checked.add(wrapper)
        self._seen = True
        if traced:
            self._traced.add(wrapper)
        new = wrapper not in self._sends
        if new:
            self.forget_users()
        if new or has_grad:
            self._sends[wrapper] = ddp.sends(wrapper)

    def forget_users(self) -> None:
        """Drops the cached map from optimizers to wrappers."""
        self._of.clear()

    def of_pass(self, binding: Binding) -> bool:
        """Returns whether ranks share the gradients of a pass that begins now, or need not.

        The first pass that sends makes the masters equal on all ranks: other passes, a single rank
        may run.
        """
        if not self._seen:
            return True
        wrappers = self._wrappers_of(binding)
        sends = all(
            # Compiled forward passes do not record it: use the state at the backward pass.
            ddp.sends(wrapper) if wrapper in self._traced else self._sends.get(wrapper, True)
            for wrapper in wrappers
        )
        if any(map(ddp.is_joining, wrappers)):
            self._join(binding)
        elif sends:
            waiting = [pair for pair in binding.pairs if pair not in self._shared]
            for wrapper in wrappers if waiting else ():
                self._share(waiting, wrapper)
        return sends

    def _wrappers_of(self, binding: Binding) -> list[DistributedDataParallel]:
        """Returns the wrappers that hold a parameter of an optimizer, looked up once."""
        if binding not in self._of:
            trained = {id(param) for param in binding.trained()}
            self._of[binding] = [
                weakref.ref(wrapper)
                for wrapper in self._sends
                if not trained.isdisjoint(ddp.sent_params(wrapper))
            ]
        return [wrapper for ref in self._of[binding] if (wrapper := ref()) is not None]

    def _share(self, pairs: Iterable[Pair], wrapper: DistributedDataParallel) -> None:
        """Broadcasts exact values of a wrapper's masters from the first rank of its group.

        The wrapper broadcasts rounded weights only, which masters follow at the step. All ranks are
        about to send gradients in one order, so this cannot deadlock, as in ``initialize``.
        """
        sent = ddp.sent_params(wrapper)
        own = [p for p in pairs if id(p.model) in sent and p not in self._shared]
        ddp.broadcast_from_first_rank([pair.master.detach() for pair in own], wrapper)
        for pair in own:
            pair.mark_shared()
        self._shared.update(own)

    def _join(self, binding: Binding) -> None:
        # A join ends by broadcasting the last rank's rounded weights; ranks that kept low bits of
        # their own would drift apart. The wrapper does not tell when it has ended.
        for pair in binding.pairs:
            pair.keeps = False
        if not self._join_warned and any(scaler.dynamic for scaler in self._scalers):
            self._join_warned = True
            _log.warning(
                "amp: in DistributedDataParallel.join(), ranks that finish early stop updating "
                "their loss scale. After the join, load one rank's amp.state_dict() on all."
            )


_living: Living[Communicator] = Living()
"""Those of every session. Compiled code may run for models of other sessions than it traced."""


@untraced
def note_compiled_run() -> None:
    """Records for every session that compiled code runs in a forward pass under a wrapper."""
    wrapper = ddp.active_wrapper()
    if wrapper is not None:
        for communicator in _living:
            communicator.note(wrapper, traced=True)


def _check_order(wrapper: DistributedDataParallel) -> None:
    cast = ddp.unsent_dtypes(wrapper)
    if cast:
        name, kind = type(wrapper.module).__name__, type(wrapper).__name__
        listed = " and ".join(sorted(map(dtypes.name, cast)))
        raise RuntimeError(
            f"{kind} wrapped the model {name} before its parameters were cast to {listed}, and "
            "does not average the gradients of parameters whose dtype has changed since. Call "
            f"amp.initialize first, then wrap the model that it returns in {kind}."
        )
