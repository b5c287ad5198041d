"""amp's state for one optimizer: the masters in its groups, its open pass, and its overflow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import exchange, is_trained, move_state, params_of
from apex._engine import masters
from apex._engine.masters import MasterPair, MasterState
from apex._engine.mistakes import Mistake
from apex._engine.stash import Stash
from apex._torch.autograd import backward_id
from apex._torch.copies import HostCopy, capturing, moved
from apex._torch.dynamo import untraced
from apex._torch.parameters import without_overrides

if TYPE_CHECKING:
    from apex._engine.backward import BackwardPass
    from apex._engine.session import Session

PREPARED = "_apex_prepared"
"""Attribute of a prepared optimizer that holds its state."""


class OverflowFlag:
    """Raised by an overflow in any pass since the last step, until a step consumes it.

    The flag is on the device of the last pass, and stays in place there, for CUDA graphs.

    Attributes:
        was_skipped: Whether the last step was skipped: known on the host, or a 0-d fp32 flag.
    """

    def __init__(self) -> None:
        """Starts without a pass."""
        self.was_skipped: Tensor | bool = False
        self._flag: Tensor | None = None
        self._is_checked = False  # whether a pass has been checked since the last step
        self._host_copy: HostCopy | None = None

    @property
    def pending(self) -> Tensor | None:
        """The flag, 0-d fp32, if a pass has been checked since the last step."""
        return self._flag if self._is_checked else None

    @property
    def device(self) -> torch.device:
        """Where the flag is."""
        return torch.device("cpu") if self._flag is None else self._flag.device

    @untraced
    def add(self, found_inf: Tensor) -> None:
        """Raises the flag if ``found_inf``, 0-d, of one more pass is set."""
        if self._flag is None:
            self._flag = torch.zeros_like(found_inf)
        self._flag = moved(self._flag, found_inf.device)
        if self._is_checked:
            torch.maximum(self._flag, found_inf, out=self._flag)
        else:
            self._flag.copy_(found_inf)
        self._is_checked = True

    def is_raised(self) -> bool:
        """Returns whether the next step is skipped. Waits for the device."""
        flag = self.pending
        return flag is not None and bool(flag.tolist())  # sync: Python code needs the answer

    @untraced
    def consume(self, skipped: Tensor | bool) -> None:
        """Lowers the flag after a step; records whether it was skipped, perhaps by the flag."""
        self.was_skipped = skipped.clone() if isinstance(skipped, Tensor) else skipped
        self._is_checked = False
        self._host_copy = None

    def await_replay(self) -> None:
        """Lowers the flag, which the next replay of a CUDA graph writes in place."""
        if self._flag is not None:
            self._flag.zero_()
            self._is_checked = True

    def was_skipped_on_host(self) -> bool | None:
        """Returns whether the last step was skipped, None until the answer has arrived."""
        skipped = self.was_skipped
        if isinstance(skipped, bool):
            return skipped
        if self._host_copy is None:
            self._host_copy = HostCopy(skipped)
        if not self._host_copy.arrived:
            return None
        return bool(self._host_copy.wait().tolist())  # sync: none, it has arrived


class PreparedOptimizer:
    """amp's state for one optimizer.

    Attributes:
        pairs: Low-precision model parameters whose masters ``param_groups`` holds, in order.
        session: Kept alive.
        masters: The table of all masters of the session.
        master_weights: Whether low-precision parameters get fp32 masters.
        inner_step: The ``step`` that the instance had before (an LR scheduler's wrapper).
        open_pass: The backward pass still to be finished, if any, or one that borrows gradients.
        overflow: Whether a pass since the last step overflowed.
        overflow_of_others: A 0-d flag: whether gradients overflowed that other optimizers' blocks
            have left. ``None`` without such blocks.
        stash: Gradients from before the open pass.
        listeners: Called after a pass that updates a scale or raises an exception.
        had_block: Whether a ``scale_loss`` block was given the optimizer.
        steps: Steps so far, skipped ones included.
        stepping: Whether the optimizer is in its step.
    """

    inner_step: Callable[..., Any] | None = None
    open_pass: BackwardPass | None = None
    had_block = False
    steps = 0
    stepping = False
    _captured: Sequence[tuple[Tensor, Tensor]] | None = None
    """Gradients of a block that a CUDA graph has captured without the step: each replay writes them
    anew. ``None`` without such a graph."""

    def __init__(self, session: Session, master_weights: bool) -> None:
        """Starts without an optimizer, which :meth:`attach` sets.

        Args:
            session: The session that has the masters.
            master_weights: Whether low-precision parameters get fp32 masters.
        """
        self.session = session
        self.masters = session.masters
        self.pairs: list[MasterPair] = []
        self.master_weights = master_weights
        self.overflow = OverflowFlag()
        self.overflow_of_others: Tensor | None = None
        self.stash = Stash()
        self.listeners: list[Callable[[BackwardPass, PreparedOptimizer], None]] = []
        session.register(self)

    # -- parameters --------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("The optimizer of this amp state has been deleted.")
        return optimizer

    @property
    def is_live(self) -> bool:
        """Whether the optimizer exists and is prepared: a pass, or a traceback, may outlive it."""
        optimizer = self._optimizer()
        return optimizer is not None and vars(optimizer).get(PREPARED) is self

    def attach(self, optimizer: Optimizer) -> None:
        """Makes this the state of ``optimizer``."""
        self._optimizer = weakref.ref(optimizer)

    def params(self) -> list[nn.Parameter]:
        """Returns every parameter that the optimizer steps, masters included."""
        return params_of(self.optimizer)

    def direct_params(self) -> list[nn.Parameter]:
        """Returns the parameters that are stepped without a master."""
        with_pair = {id(pair.master) for pair in self.pairs}
        return [param for param in self.params() if id(param) not in with_pair]

    def low_params(self) -> list[nn.Parameter]:
        """Returns the 16-bit parameters in the groups."""
        return [param for param in self.params() if param.dtype in dtypes.LOW_PRECISION]

    def trained_params(self) -> list[nn.Parameter]:
        """Returns the models' parameters that the optimizer trains, with or without a master."""
        trained: list[nn.Parameter] = []
        for param in self.params():
            model = param._apex_model if type(param) is masters.Master else None
            trained.append(param if model is None else model)
        return trained

    def check_new_params(self, new: Sequence[nn.Parameter]) -> None:
        """Raises ValueError unless the optimizer can take these parameters of models now."""
        if self.open_pass is None or not self.open_pass.scaled:
            return
        if any(param.grad is not None for param in new):
            raise ValueError(
                "add_param_group got a parameter that has a gradient, before the gradients of "
                "earlier amp.scale_loss blocks are unscaled: nobody knows whether this one is "
                "scaled, too. Clear it first (param.grad = None), or add the group before the "
                "first block with delay_unscale=True or after the last block of the step."
            )

    @untraced
    def create_missing_masters(self) -> bool:
        """Puts masters in place of trained low-precision parameters in the groups, all or none.

        A frozen parameter without state stays and gets its master when unfrozen. Returns whether
        masters were created.
        """
        if not self.master_weights:
            return False
        state = self.optimizer.state
        created: dict[int, MasterPair] = {}
        with without_overrides():
            for param in self.low_params():
                if is_trained(param) or param in state:
                    created[id(param)] = self.masters.create(param, self)
        if not created:
            return False
        known = {id(pair.model) for pair in self.pairs}
        self.pairs += [pair for key, pair in created.items() if key not in known]
        exchange(self.optimizer, {key: pair.master for key, pair in created.items()})
        return True

    def close(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state."""
        exchange(self.optimizer, {id(pair.master): pair.model for pair in self.pairs})
        self.pairs.clear()
        self.session.mistakes.stop_observing()

    # -- gradients ---------------------------------------------------------------------------

    @untraced
    def update_masters(self, *, before_step: bool = False) -> None:
        """Copies written weights to the masters, for a step or a script that reads them."""
        self.create_missing_masters()
        if masters.update_masters_from_model(self.pairs, before_step=before_step):
            move_state(self.optimizer)

    @untraced
    def finish_backward(self) -> None:
        """Finishes an open pass, which unscales its gradients."""
        opened = self.open_pass
        if opened is None:
            return
        if backward_id() == -1:
            opened.finish_for(self)
        elif opened.scaled:
            raise RuntimeError(
                "optimizer.step() was called during the backward pass of amp.scale_loss (by a "
                "hook), while the gradients are still scaled. Step after the pass, or use a "
                "loss scale of 1 (loss_scale=1.0; the default of O0, O3, O4 and O5)."
            )

    def update_masters_with_grads(self) -> None:
        """Finishes an open pass; updates the masters with the model's values and gradients."""
        self.finish_backward()
        self.update_masters()
        masters.widen_grads(self.pairs)

    def has_grads(self) -> bool:
        """Returns whether there is a gradient."""
        return any(param.grad is not None for param in self.trained_params())

    def make_room(self, *, scaled: bool, continues: bool = False) -> None:
        """Prepares the gradients for a pass that adds to them.

        A scaled pass begins without gradients. DistributedDataParallel adds no 16-bit gradients to
        fp32 ones, so its passes do, too. Otherwise autograd adds to fp32 ones. A pass that
        continues another adds to scaled gradients as they are, as in apex.

        Args:
            scaled: Whether the pass multiplies gradients by a loss scale.
            continues: Whether it adds to the gradients of a delayed pass.
        """
        under_ddp = self.session.ddp_tracker.wrappers
        if continues and (scaled or under_ddp):
            return
        if scaled:
            self._put_aside(self.trained_params())
        elif under_ddp:
            self._put_aside([pair.model for pair in self.pairs])
        else:
            masters.widen_nonzero_grads(self.pairs)

    def _put_aside(self, params: Sequence[nn.Parameter]) -> None:
        self.stash.put_aside(params, self.session.reuses_grad)

    def give_back(self) -> None:
        """Adds the gradients that were put aside."""
        self.stash.give_back(self.masters.pair_of)

    def remove_grads(self) -> None:
        """Removes all gradients."""
        with without_overrides():
            for param in self.trained_params():
                param.grad = None

    def forget_cleared(self, cleared: set[int]) -> None:
        """Forgets what unfinished passes hold for parameters, by ``id``, that were cleared.

        If they are all of the optimizer's, a delayed pass ends for it.
        """
        self.stash.drop(cleared)
        delayed = self.open_pass
        is_delayed = delayed is not None and not delayed.is_open
        if not self.is_live or not (is_delayed or self.overflow_of_others is not None):
            return
        if cleared.issuperset(map(id, self.trained_params())):
            self.overflow_of_others = None
            if delayed is not None and is_delayed:
                delayed.forget(self)

    def add_overflow_of_others(self, overflow: Tensor) -> None:
        """Adds whether gradients overflowed that one more block of others has left."""
        if self.overflow_of_others is not None:
            overflow = torch.maximum(moved(self.overflow_of_others, overflow.device), overflow)
        self.overflow_of_others = overflow

    def settle_overflow(self, *, takes: bool) -> None:
        """Ends what other optimizers' blocks have found, if the gradients were cleared since.

        Otherwise, if the optimizer ``takes`` the gradients for its own block or step, an overflow
        is now its own.
        """
        overflow = self.overflow_of_others
        if overflow is None:
            return
        has_grads = self.has_grads()
        if has_grads and takes:
            self.overflow.add(overflow)
        if takes or not has_grads:
            self.overflow_of_others = None

    def drop_overflowed(self) -> None:
        """Drops gradients that overflowed, for a script that continues without amp."""
        self.settle_overflow(takes=True)
        if not self.overflow.is_raised():
            return
        self.remove_grads()
        self.overflow.consume(skipped=False)
        self.session.mistakes.warn(Mistake.RESTORED_OVERFLOW)

    # -- the step ----------------------------------------------------------------------------

    @untraced
    def begin_step(self, *, has_closure: bool = False) -> None:
        """Updates the masters with weights that were written since the last step.

        Finishes an open pass. A closure's own pass may continue it, so with a closure it stays
        open.
        """
        if self._captured is not None:
            self._check_captured()
        if not has_closure:
            self.finish_backward()
        self.settle_overflow(takes=True)
        self.update_masters(before_step=True)
        self.steps += 1
        self.stepping = True

    @untraced
    def end_step(self, *, failed: bool) -> None:
        """Ends a step; one that failed leaves the overflow for another try."""
        self.stepping = False
        self.masters.steps += 1
        if failed:
            return
        trained = MasterState.TRAINED  # each look-up of an Enum's member takes 0.1 us
        for pair in self.pairs:
            pair.state = trained
        if self._captured is not None:
            for param, grad in self._captured:
                param.grad = grad
            self.overflow.await_replay()

    # -- CUDA graphs -------------------------------------------------------------------------

    def keep_captured(self) -> None:
        """Keeps the gradients of a block that a CUDA graph captures, for steps after replays."""
        models = [pair.model for pair in self.pairs]
        self._captured = [(param, param.grad) for param in models if param.grad is not None]

    def _check_captured(self) -> None:
        """Checks, at a step, the gradients that a CUDA graph has captured.

        If the graph captures the step, too, later steps are not checked.

        Raises:
            RuntimeError: If the gradients were cleared, so that a replay would train nothing.
        """
        if capturing(self.params()[0].device):
            self._captured = None
        elif not self.has_grads():
            raise RuntimeError(
                "optimizer.step() has no gradients, although a CUDA graph has captured a "
                "scale_loss block: they were cleared after the capture, while each replay writes "
                "the same tensors. Call optimizer.zero_grad() before the capture only, or capture "
                "the step, too."
            )

    @untraced
    def must_skip(self) -> bool:
        """Returns whether an overflow skips the step. Waits for the device.

        Raises:
            RuntimeError: If a CUDA graph captures the step.
        """
        if capturing(self.overflow.device):
            raise RuntimeError(
                f"A CUDA graph captures the step of {type(self.optimizer).__name__}, which asks on "
                "the host whether to skip it. Use an optimizer that skips on the device "
                "(one of apex.optimizers, or of torch.optim with fused=True; SGD with momentum "
                "from its second step on), a static loss_scale, or call optimizer.step() outside "
                "the graph."
            )
        return self.overflow.is_raised()
