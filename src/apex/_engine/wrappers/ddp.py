"""Tracks DistributedDataParallel: which gradients are sent, and masters equal on all ranks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Wrapper

from apex._core import dtypes
from apex._engine.masters import MasterState
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._torch import ddp, parameters, ranks

if TYPE_CHECKING:
    from apex._engine.session import Session


@dataclass
class _WrapperState:
    """The state of one wrapper.

    Attributes:
        sent: Ids of the parameters whose gradients it averages over all ranks.
        sends: Whether the latest forward pass under it will send its gradients.
        traced: Whether its forward passes are compiled, which record nothing.
        shared: Whether its masters have been made equal on all ranks.
    """

    sent: set[int]
    sends: bool = True
    traced: bool = False
    shared: bool = False


class DDPTracker:
    """The DistributedDataParallel wrappers that a session's models run under.

    Attributes:
        wrappers: The wrappers, in the order of their first forward passes, so that all ranks
            communicate alike.
        wrapped_first: Whether a library wraps models before amp prepares them, on all ranks alike.
    """

    def __init__(self) -> None:
        """Starts without wrappers."""
        self.wrapped_first = False
        self.wrappers = weakref.WeakKeyDictionary[Wrapper, _WrapperState]()

    def mark_forward(self, wrapper: Wrapper, session: Session, *, traced: bool) -> None:
        """Records that a model's forward pass begins under a wrapper, and if that sends gradients.

        Args:
            wrapper: The wrapper.
            session: The session of the model.
            traced: Whether the pass is being compiled, or runs in compiled code.

        Raises:
            RuntimeError: If the wrapper was made before its parameters were cast, so that it would
                train each rank on gradients of its own, or if ranks may run out of data.
        """
        if wrapper not in self.wrappers:
            if self.wrapped_first or ranks.world_size() == 1:
                ddp.rebuild_reducer(wrapper)
            else:
                _check_order(wrapper)
            ignored = wrapper.parameters_to_ignore
            named = wrapper.module.named_parameters()
            sent = {id(param) for name, param in named if name not in ignored}
            self.wrappers[wrapper] = _WrapperState(sent)
        if ddp.is_joining(wrapper):
            _check_join(session)
        state = self.wrappers[wrapper]
        if traced:
            state.traced = True
        if torch.is_grad_enabled():
            state.sends = ddp.sends(wrapper)

    def owns_buffer(self, param: Tensor) -> bool:
        """Returns whether a parameter's gradient is a view of a wrapper's buffer, which it reuses.

        The gradient's storage does not show this: a buffer of one parameter has the same size.
        """
        for wrapper, state in self.wrappers.items():
            if wrapper.gradient_as_bucket_view and id(param) in state.sent:
                return True
        return False

    def sends(self, prepared: PreparedOptimizer) -> bool:
        """Returns whether ranks share the gradients of a pass that begins now, or need not."""
        trained = {*map(id, prepared.trained_params())}
        for wrapper, state in self.wrappers.items():
            if trained.isdisjoint(state.sent):
                continue
            # A compiled forward pass records nothing: use the state at the backward pass.
            if not (ddp.sends(wrapper) if state.traced else state.sends):
                return False
        return True

    def share_masters(self, prepared: PreparedOptimizer) -> None:
        """Makes masters equal on all ranks, once for each wrapper of an optimizer's parameters.

        The wrapper broadcasts rounded weights only. This communicates: call it before a pass that
        sends gradients, which all ranks run in one order.
        """
        for wrapper, state in self.wrappers.items():
            if state.shared or state.sent.isdisjoint(map(id, prepared.trained_params())):
                continue
            state.shared = True
            pairs = [pair for pair in prepared.masters.pairs() if id(pair.model) in state.sent]
            if pairs:
                ddp.broadcast(wrapper, [parameters.uncounted(pair.master) for pair in pairs])
            for pair in pairs:
                pair.state = MasterState.EXACT


def _check_join(session: Session) -> None:
    # A join ends by broadcasting the last rank's rounded weights: masters would drift apart, and
    # ranks that finish early stop updating their loss scale.
    if session.masters.pairs() or session.can_skip:
        raise RuntimeError(
            "DistributedDataParallel.join() does not share fp32 masters and dynamic loss scales "
            "among ranks. Use opt_level='O4', or give all ranks as many batches: "
            "DistributedSampler does."
        )


def _check_order(wrapper: Wrapper) -> None:
    cast = ddp.unsent_dtypes(wrapper)
    if not cast:
        return
    model_name = type(wrapper.module).__name__
    wrapper_name = type(wrapper).__name__
    names = " and ".join(sorted(map(dtypes.name, cast)))
    raise RuntimeError(
        f"{wrapper_name} wrapped the model {model_name} before its parameters were cast to "
        f"{names}, and does not average the gradients of parameters whose dtype has changed "
        "since. Call amp.initialize first, then wrap the model that it returns in "
        f"{wrapper_name}. If a library wraps it, as Lightning 1.x does, train at O1 or O4, which "
        "keep fp32 weights. For Lightning 2, there is apex.integrations.lightning.ApexPrecision."
    )
