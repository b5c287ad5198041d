"""DistributedDataParallel, torch's and apex's: which gradients it sends, and equal masters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from apex._engine import master_table
from apex._engine.masters import mark_exact
from apex._torch import ddp, parameters, ranks


@dataclass
class _WrapperState:
    """The state of one wrapper.

    Attributes:
        wrapper: A weak reference to it.
        sent: Ids of the parameters whose gradients it averages over all ranks.
        sends_forward: Whether it will send the gradients of a forward pass that it has run;
            ``None`` without one since the last pass.
        watched: Whether an output of its last forward pass, or hooks of all its parameters, tell
            when a pass begins.
        follows_forwards: Whether forward passes of a prepared model tell what it sends. They do
            not if the wrapped module calls another method of the model.
        shared: Whether its masters have been made equal on all ranks.
        is_local: Whether ranks may hold gradients that it has yet to send, as of passes under
            ``no_sync`` or around it.
    """

    wrapper: weakref.ref[DistributedDataParallel]
    sent: set[int]
    sends_forward: bool | None = None
    watched: bool = False
    follows_forwards: bool = False
    shared: bool = False
    is_local: bool = True

    def mark_forward(self, wrapper: DistributedDataParallel, *, watched: bool) -> None:
        """Records whether a forward pass that begins now will send its gradients."""
        self.watched = watched
        self.follows_forwards = True
        self.sends_forward = ddp.sends(wrapper) or bool(self.sends_forward)
        self.is_local |= not self.sends_forward

    def sends(self, wrapper: DistributedDataParallel) -> bool | None:
        """Returns whether the next pass sends its gradients; ``None`` if nothing has told."""
        return self.sends_forward if self.follows_forwards else ddp.sends(wrapper)

    def end_pass(self, wrapper: DistributedDataParallel, *, is_sent: bool) -> None:
        """Records that a pass has ended: a forward pass sends only one."""
        # Without a forward pass since, a wrapper has sent nothing: what is local stays so.
        if self.sends_forward or not is_sent:
            self.is_local = not is_sent
        if not ddp.is_unfinished(wrapper):
            self.sends_forward = None


class DDPWrappers:
    """The DistributedDataParallel wrappers of this process that prepared models run under.

    Attributes:
        states: Those of live wrappers, in the order of their first forward passes, so that all
            ranks communicate alike.
    """

    def __init__(self) -> None:
        """Starts without wrappers."""
        self.states: list[_WrapperState] = []

    def mark_forward(
        self, wrapper: DistributedDataParallel, *, watched: bool, drifts: bool, scaled: bool
    ) -> None:
        """Records that a model's forward pass begins under a wrapper, and if that sends gradients.

        Args:
            wrapper: The wrapper.
            watched: Whether hooks of parameters tell when a pass begins.
            drifts: Whether there is state that ``join`` does not share among ranks.
            scaled: Whether a loss has a scale.

        Raises:
            RuntimeError: If ranks may run out of data, or the wrapper averages gradients in memory
                that blocks do not leave to them.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return  # no pass follows
        state = self._state_of(wrapper) or self._add(wrapper)
        if not state.follows_forwards:
            ddp.rebuild_reducer(wrapper)  # it may be older than the parameters' casts
        if drifts and ddp.is_joining(wrapper):
            # A join ends by broadcasting the last rank's rounded weights: masters would drift
            # apart, and ranks that finish early stop updating their loss scale.
            raise RuntimeError(
                "DistributedDataParallel.join() does not share fp32 masters and dynamic loss "
                "scales among ranks. Use opt_level='O4', or give all ranks as many batches: "
                "DistributedSampler does."
            )
        if (drifts or scaled) and ddp.delays_all_reduce(wrapper):
            raise RuntimeError(
                "DistributedDataParallel's delay_all_reduce_named_params averages gradients in a "
                "buffer of its own, which amp.scale_loss puts aside: ranks would drift apart. "
                "Leave the option out, or use opt_level='O4' without a loss scale."
            )
        state.mark_forward(wrapper, watched=watched)

    def _add(self, wrapper: DistributedDataParallel) -> _WrapperState:
        sent = {*map(id, ddp.sent_params(wrapper))}
        state = _WrapperState(weakref.ref(wrapper, self._forget), sent)
        self.states.append(state)
        return state

    def find(self, params: Sequence[Tensor]) -> None:
        """Finds the wrappers of parameters under which no prepared model's forward has run."""
        if ranks.world_size() == 1 or self.of(params):
            return
        positions = {id(param): position for position, param in enumerate(params)}
        found: dict[int, DistributedDataParallel] = {}
        for wrapper in ddp.live_wrappers():
            own = [positions[id(p)] for p in wrapper.parameters() if id(p) in positions]
            if own:
                found[own[0]] = wrapper
        for position in sorted(found):  # so that all ranks communicate alike
            self._add(found[position])

    def mark_compiled_forward(self, *, watched: bool) -> None:
        """As :meth:`mark_forward`, where compiled code runs under the active wrapper, if known."""
        active = ddp.active_wrapper()
        state = self._state_of(active)
        if active is not None and state is not None and torch.is_grad_enabled():
            state.mark_forward(active, watched=watched)

    def reused(self, params: Sequence[Tensor]) -> set[int]:
        """Returns ids of the parameters whose gradients are views of buffers of their wrappers.

        Raises:
            RuntimeError: If a wrapper has yet to replace gradients by averages.
        """
        reused: set[int] = set()
        for wrapper, state in self.of(params):
            if ddp.is_unfinished(wrapper):
                raise RuntimeError(
                    "amp.scale_loss was entered before DistributedDataParallel had averaged the "
                    "gradients of the block before, whose loss did not use all parameters. Add up "
                    "the losses of a forward pass in one block, or pass delay_unscale=True to all "
                    "blocks but the last, and the optimizers of all losses to each. If no loss "
                    "uses some parameters, pass find_unused_parameters=True to "
                    "DistributedDataParallel."
                )
            if wrapper.gradient_as_bucket_view:
                reused |= state.sent
        return reused

    def is_unfinished(self, params: Sequence[Tensor]) -> bool:
        """Returns whether a wrapper has yet to replace gradients of parameters by averages."""
        return any(ddp.is_unfinished(wrapper) for wrapper, _ in self.of(params))

    def sent(self, params: Sequence[Tensor]) -> set[int]:
        """Returns ids of those of the parameters whose gradients wrappers send in this pass."""
        sent: set[int] = set()
        for wrapper, state in self.of(params):
            if state.sends(wrapper):
                sent |= state.sent.intersection(map(id, params))
        return sent

    def shares(self, params: Sequence[Tensor]) -> bool:
        """Returns whether this pass sends all gradients of the parameters' wrappers, if any."""
        sends = {state.sends(wrapper) for wrapper, state in self.of(params)}
        return not sends or (True in sends and False not in sends)

    def of(self, params: Sequence[Tensor]) -> list[tuple[DistributedDataParallel, _WrapperState]]:
        """Returns the wrappers that send a gradient of these parameters."""
        found: list[tuple[DistributedDataParallel, _WrapperState]] = []
        for state in self.states:
            wrapper = state.wrapper()
            if wrapper is not None and not state.sent.isdisjoint(map(id, params)):
                found.append((wrapper, state))
        return found

    def _state_of(self, wrapper: DistributedDataParallel | None) -> _WrapperState | None:
        return next((state for state in self.states if state.wrapper() is wrapper), None)

    def _forget(self, dead: weakref.ref[DistributedDataParallel]) -> None:
        self.states = [state for state in self.states if state.wrapper is not dead]

    def drop(self, params: Sequence[Tensor]) -> None:
        """Forgets the wrappers of a model that becomes plain, and has them send its dtypes."""
        for wrapper, state in self.of(params):
            self.states.remove(state)
            if ranks.is_running():
                ddp.rebuild_reducer(wrapper)

    def end_pass(self, params: Sequence[Tensor], *, sent: Set[int]) -> None:
        """Records that a pass over parameters is over.

        Args:
            params: The parameters.
            sent: What :meth:`sent` returned when it began.
        """
        for wrapper, state in self.of(params):
            state.end_pass(wrapper, is_sent=not state.sent.isdisjoint(sent))

    def end_block(self, params: Sequence[Tensor], *, is_sent: bool) -> None:
        """As :meth:`end_pass`, for a block: only where nothing has told of its passes."""
        for wrapper, state in self.of(params):
            if not state.watched:
                state.end_pass(wrapper, is_sent=is_sent)

    def watch(self, wrapper: DistributedDataParallel) -> None:
        """Records that an output of its forward pass tells when a pass begins."""
        state = self._state_of(wrapper)
        if state is not None:
            state.watched = True

    def sends_earlier(self, params: Sequence[Tensor]) -> bool:
        """Returns whether this pass sends what ranks may hold of earlier ones."""
        found = self.of(params)
        return any(state.is_local and state.sends(wrapper) for wrapper, state in found)

    def share_masters(self, params: Sequence[Tensor]) -> None:
        """Broadcasts masters, once for each wrapper of the parameters.

        The wrapper broadcasts rounded weights only.
        """
        for wrapper, state in self.of(params):
            if state.shared:
                continue
            state.shared = True
            pairs = [pair for pair in master_table.all_pairs() if id(pair.model) in state.sent]
            if pairs:
                ddp.broadcast(wrapper, [parameters.uncounted(pair.master) for pair in pairs])
                mark_exact(pairs)


wrappers = DDPWrappers()
"""Those of this process."""
