"""amp's state for one optimizer: the masters in its groups, its unfinished pass, and its step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes, tree
from apex._core.param_groups import exchange, is_trained, move_state, params_of, states_in
from apex._engine import master_table, masters
from apex._engine.autocast import ambient
from apex._engine.masters import Master, MasterPair
from apex._engine.optimizer import block_step
from apex._engine.optimizer.block_step import BlockStep, skips_in_kernel
from apex._engine.passes import prepare_grads, return_views
from apex._engine.scaler import OverflowFlag, Scaler
from apex._engine.session import Session, live_optimizers
from apex._engine.stash import Stash
from apex._engine.wrappers import fsdp
from apex._engine.wrappers.ddp import wrappers
from apex._torch import dtensor, foreach, ranks
from apex._torch.autograd import backward_id
from apex._torch.copies import capturing, moved
from apex._torch.dynamo import is_compiling_here, untraced, untraced_frame
from apex._torch.modules import params_in
from apex._torch.parameters import without_overrides

_SECOND_ORDER = (
    "amp.initialize put fp32 masters into the optimizer's groups, but the graph of the loss has "
    "the model's own parameters. An optimizer that differentiates gradients needs opt_level 'O4'."
)
"""The fix for optimizers such as AdaHessian and Sophia."""

_LOW_STATE = (
    "optimizer.state holds 16-bit tensors, but the optimizer steps fp32 masters. Make state like "
    "the parameters in optimizer.param_groups, or like the model's with dtype=torch.float32."
)
"""The fix for state that a script has made like the model's parameters."""


class Pass(Protocol):
    """A backward pass, as the optimizers see it whose gradients it computes."""

    scaled: bool
    """Whether gradients are multiplied by a loss scale until it ends."""

    stash: Stash
    """Earlier gradients of parameters that no optimizer steps."""

    @property
    def is_open(self) -> bool:
        """Whether its block has been entered and not left."""
        ...

    def finish_for(self, prepared: PreparedOptimizer) -> None:
        """Unscales the gradients of an optimizer that steps."""
        ...

    def forget(self, prepared: PreparedOptimizer) -> None:
        """Ends the pass for an optimizer whose gradients were cleared after a delayed block."""
        ...


class PreparedOptimizer:
    """amp's state for one optimizer."""

    def __init__(self, session: Session, optimizer: Optimizer) -> None:
        """Starts without masters.

        Args:
            session: The session, which is kept alive.
            optimizer: The optimizer, which keeps this state alive.
        """
        self.session = session
        self._optimizer = weakref.ref(optimizer)
        # The thread that used it last.
        self._thread = session.thread
        # The ``step`` that the instance has, such as the wrapper of an LR scheduler made earlier.
        self.inner_step: Callable[..., Any] | None = vars(optimizer).get("step")
        # Low-precision model parameters whose masters the groups hold, in order.
        self.pairs: list[MasterPair] = []
        # A pass of its own that is open or unchecked, or another's that its gradients are lent to.
        self.unfinished_pass: Pass | None = None
        # Gradients from before that pass, while its block is open.
        self.stash = Stash()
        # Whether a pass since the last step overflowed.
        self.overflow = OverflowFlag()
        # Whether gradients overflowed that other optimizers' blocks have left, 0-d.
        self.overflow_of_others: Tensor | None = None
        # The scales of those gradients.
        self._scalers_of_others: set[Scaler] = set()
        # Called with a pass and this object after each pass that updates the scale, or failed.
        self.listeners: list[Callable[..., None]] = []
        # What observers have put on its parameters, until it is plain again.
        self.until_plain = ExitStack()
        # Whether its first block has begun.
        self._has_begun = False
        # Steps so far, skipped ones included.
        self.steps = 0
        # An optimizer inside another steps as a part of its step.
        self.stepping = False
        # The present step, if it runs by blocks.
        self._blocks: BlockStep | None = None
        # Whether torch's GradScaler has looked at it since its last step. A step asks the optimizer
        # as a GradScaler does, so it starts anew.
        self.asked_by_grad_scaler = False
        # Gradients of a block that a CUDA graph has captured without the step: each replay writes
        # them anew. None without such a graph.
        self._captured: Sequence[tuple[Tensor, Tensor]] | None = None

    # -- parameters --------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return cast(Optimizer, self._optimizer())

    def params(self) -> list[nn.Parameter]:
        """Returns every parameter that the optimizer steps, masters included; none once deleted."""
        return params_of(self._optimizer())

    def trained_params(self) -> list[nn.Parameter]:
        """Returns the models' parameters that the optimizer trains, with or without a master."""
        params = params_of(self._optimizer())
        return [getattr(param, "_apex_model", param) for param in params]

    @untraced
    def create_missing_masters(self) -> bool:
        """Puts masters in place of trained low-precision parameters in the groups, all or none.

        Finds the pairs anew, as a script may move masters to another optimizer. A frozen parameter
        without state stays and gets its master when unfrozen. Returns whether masters were created.
        """
        if not self.session.policy.master_weights:
            return False
        created: dict[int, nn.Parameter] = {}
        pairs: list[MasterPair] = []
        param: Any
        with without_overrides():
            for param in params_of(self._optimizer()):
                if issubclass(type(param), Master):
                    pair = param._apex_pair()
                    if pair is not None:
                        pairs.append(pair)
                    continue
                is_used = is_trained(param) or param in self.optimizer.state
                if is_used and dtypes.is_low_precision(param):
                    pair = master_table.create(param)
                    created[id(param)] = pair.master
                    pairs.append(pair)
        self.pairs = pairs
        if created:
            exchange(self.optimizer, created)
            stepped = {*map(id, self.params())}  # as a master equals its parameter
            if not stepped.issuperset(map(id, created.values())):
                self._take_back_masters()
                raise TypeError(
                    f"A group of {type(self.optimizer).__name__} holds its parameters in a "
                    "container in which amp cannot put their fp32 masters. Use a list, or "
                    "opt_level='O4'."
                )
        return bool(created)

    def adopt_states(self) -> None:
        """Puts state that a script has put under a model's parameter under its master."""
        known = {id(pair.model): pair.master for pair in self.pairs}
        if not known.keys().isdisjoint(map(id, self.optimizer.state)):
            exchange(self.optimizer, known)

    def _has_low_state(self) -> bool:
        """Returns whether the optimizer has 16-bit state."""
        states = [own for _, own in states_in(self.optimizer.state)]
        return any(map(dtypes.is_low_precision, tree.tensors(states)))

    def _take_back_masters(self) -> None:
        """Puts the model's own parameters back into the groups, with the optimizer's state."""
        exchange(self.optimizer, {id(pair.master): pair.model for pair in self.pairs})
        self.pairs.clear()

    def close(self) -> None:
        """Becomes plain: without masters and observers."""
        self._take_back_masters()
        self.until_plain.close()
        live_optimizers.remove(self)

    # -- passes ------------------------------------------------------------------------------

    @property
    def is_used_here(self) -> bool:
        """Whether this thread has used it last: passes in others do not reach its gradients."""
        return self._thread is ambient.this_thread()

    def lends_to(self, session: Session) -> bool:
        """Whether a pass of a session in this thread may borrow its gradients, which are unscaled.

        Not from another session after it has changed threads: a pool may go on with it elsewhere.
        """
        begun = self.unfinished_pass
        is_free = begun is None or not (begun.scaled or begun.is_open)
        stays = self._thread is self.session.thread or self.session is session
        return is_free and stays

    def begin_first_block(self) -> None:
        """Checks its models and finds their wrappers, but only in its first block."""
        if not self._has_begun:
            self.session.check_shards()
            wrappers.find(self.trained_params())
            self._has_begun = True

    def begin_pass(self, begun: Pass, *, in_place: bool) -> None:
        """Prepares the gradients for a pass that was given the optimizer, or that may reach it."""
        self._thread = ambient.this_thread()
        if self._captured is not None and not self.has_grads():
            self.overflow.await_replay()  # its flag tells of gradients that were cleared
        self.make_room(scaled=begun.scaled, in_place=in_place)
        self.unfinished_pass = begun

    def end_pass(self, earlier: Pass | None = None) -> None:
        """Ends the pass; an earlier one may still be unchecked."""
        self.unfinished_pass = earlier

    # -- gradients ---------------------------------------------------------------------------

    @untraced
    def update_masters(self) -> None:
        """Copies written weights to the masters, for a step or a script that reads them."""
        if masters.update_masters_from_model(self.pairs):
            move_state(self.optimizer)

    @untraced
    def finish_backward(self) -> None:
        """Finishes an open or delayed pass, which unscales and checks its gradients."""
        opened = self.unfinished_pass
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

    def make_room(self, *, scaled: bool, in_place: bool = False) -> None:
        """Prepares the gradients for a pass that adds to them.

        A scaled pass begins without gradients, and so does one under DistributedDataParallel, which
        adds no 16-bit gradients to fp32 ones.

        Args:
            scaled: Whether the pass multiplies gradients by a loss scale.
            in_place: Whether it adds to the gradients in place, which have its scale.
        """
        if not (scaled or self.pairs):  # autograd adds to fp32 gradients as they are
            return
        params: Sequence[nn.Parameter] = [pair.model for pair in self.pairs]
        if in_place or not (scaled or wrappers.of(params)):
            prepare_grads(self.pairs, params)
            return
        if scaled:
            params = self.trained_params()
        self.stash.put_aside(params, wrappers.reused(params))

    def forget_cleared(self, cleared: Sequence[Tensor]) -> None:
        """Forgets what unfinished passes hold for parameters whose gradients were cleared.

        If they are all of the optimizer's, a delayed pass ends for it.
        """
        self.stash.drop(cleared)
        begun = self.unfinished_pass
        if begun is not None:
            begun.stash.drop(cleared)
        is_delayed = begun is not None and not begun.is_open
        if not (is_delayed or self.overflow_of_others is not None):
            return
        if {*map(id, cleared)}.issuperset(map(id, self.trained_params())):
            self._forget_overflow_of_others()
            if begun is not None and is_delayed:
                begun.forget(self)

    def add_overflow_of_others(self, overflow: Tensor, scalers: Collection[Scaler]) -> None:
        """Adds whether gradients overflowed that one more block of others has left.

        Args:
            overflow: Whether they did, 0-d.
            scalers: The scales that they had, which are to back off.
        """
        if self.overflow_of_others is not None:
            overflow = torch.maximum(moved(self.overflow_of_others, overflow.device), overflow)
        self.overflow_of_others = overflow
        self._scalers_of_others.update(scalers)

    def _forget_overflow_of_others(self) -> None:
        self.overflow_of_others = None
        self._scalers_of_others.clear()

    @untraced
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
            self.check_left_grads()  # first, as it relies on a flag that has an answer
            self.overflow.add(overflow)
            if ranks.world_size() == 1:  # several do not agree on what blocks of others find
                for scaler in self._scalers_of_others:
                    scaler.follow(overflow, counts=False)
        if takes or not has_grads:
            self._forget_overflow_of_others()

    @untraced
    def check_left_grads(self) -> None:
        """Checks what a skipped step may have left, before it is used again."""
        if self.overflow.was_skipped is False or self.overflow.pending is not None:
            return
        params = grads_of([self])
        values = dtensor.values_of(params)
        if values:
            overflow = torch.zeros((), dtype=torch.float32, device=self.overflow.device)
            foreach.unscale_and_check_(values, torch.ones_like(overflow), overflow)
            dtensor.share_flag_(overflow, params)
            self.overflow.add(overflow)

    @property
    def has_overflow_flag(self) -> bool:
        """Whether a pass since the last step may have overflowed."""
        return self.overflow.pending is not None or self.overflow_of_others is not None

    def drop_overflowed(self) -> bool:
        """Drops gradients that overflowed, where code without amp is to step them.

        Returns whether there are such gradients.
        """
        self.settle_overflow(takes=True)
        if not self.overflow.is_raised():
            return False
        masters.remove_grads(self.trained_params())
        self.overflow.consume(skipped=True)
        return True

    # -- the step ----------------------------------------------------------------------------

    @untraced_frame
    def step(
        self, stepped: Optimizer, run: Callable[..., Any], closure: Callable[[], Any] | None
    ) -> Any:
        """Runs the optimizer's own step unless a gradient overflowed; updates the model.

        Returns its result, ``None`` for a skipped step. After an exception, gradients and overflow
        are there for another try.

        Args:
            stepped: The optimizer, or one inside it.
            run: The own step of ``stepped``.
            closure: A function that computes the gradients.

        Raises:
            RuntimeError: If there is a closure, and the loss scale is dynamic.
        """
        self._begin_step(closure)
        optimizer: Any = self.optimizer
        hooks = self._follow_writes(stepped, run)
        uncast = ambient.UncastBlock(ambient.devices_on())
        overrides: AbstractContextManager[Any] = nullcontext()
        self.steps += 1
        self.stepping = True
        try:
            if closure is not None:
                run = functools.partial(run, self._evaluation(uncast.with_casts(closure)))
            elif self.pairs:
                overrides = self._show_grads(optimizer)
            with uncast, overrides:
                result, skipped = self._run_unless_overflow(optimizer, run)
        except RuntimeError as error:
            text = str(error)
            if self.pairs and "been used in the graph" in text:
                error.args = (f"{text}\n{_SECOND_ORDER}",)
            elif self.pairs and "dtype" in text and self._has_low_state():
                error.args = (f"{text}\n{_LOW_STATE}",)
            raise
        finally:
            self.stepping = False
            self.asked_by_grad_scaler = False
            for handle in hooks:
                handle.remove()
            self._leave_own_step()
        self.overflow.consume(skipped)
        masters.mark_trained(self.pairs)
        if self._captured is not None:
            self._await_replay(self._captured)
        return result

    @untraced_frame
    def _show_grads(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Makes the masters' gradients fp32, by blocks in the step itself where that saves memory.

        Returns the context of the step.
        """
        if is_compiling_here():
            masters.widen_grads(self.pairs)
            return masters.shown(self.pairs)
        self._blocks = block_step.begin(optimizer, self.pairs)
        if self._blocks is None:
            masters.widen_grads(self.pairs)
        # Others may keep state in subclasses of tensors.
        if optimizer.__class__.__module__.startswith(("torch.optim.", "apex.optimizers.")):
            return without_overrides()
        return nullcontext()

    @untraced
    def _begin_step(self, closure: object) -> None:
        """Checks a step, and finishes the pass whose gradients it takes."""
        self._thread = ambient.this_thread()
        if self._captured is not None:
            self._check_captured()
        if not self.steps:
            self.session.check_shards()
        self.session.observer.step_begins(self)
        if closure is None:
            self.session.observer.gradients_used(self)
            self.finish_backward()
        else:  # its own pass may continue an unfinished one
            self._check_closure()
        self.check_left_grads()
        self.settle_overflow(takes=True)

    @untraced
    def _follow_writes(self, optimizer: Any, run: object) -> Sequence[RemovableHandle]:
        """Makes masters and weights follow what hooks around the own step write.

        Masters are updated after a script's hooks before it, and rounded into the model before the
        hooks after it. Returns the handles of the hooks that do this.
        """
        self.create_missing_masters()
        # dynamo would trace them. torch marks a step that runs hooks.
        if is_compiling_here() or not getattr(run, "hooked", False):
            self._enter_own_step()
            return ()
        if not self.pairs:
            return ()
        entering = optimizer.register_step_pre_hook(self._enter_own_step)
        leaving = optimizer.register_step_post_hook(self._leave_own_step)
        optimizer._optimizer_step_post_hooks.move_to_end(leaving.id, last=False)
        return entering, leaving

    @untraced
    def _enter_own_step(self, *_: object) -> None:
        self.update_masters()
        masters.expect_step(self.pairs)

    @untraced
    def _leave_own_step(self, *_: object) -> None:
        if self._blocks is not None:
            self._blocks.end()
            self._blocks = None
        masters.update_model_from_masters(self.pairs, ends_step=True)
        return_views()

    @untraced_frame
    def _run_unless_overflow(
        self, optimizer: Any, run: Callable[..., Any]
    ) -> tuple[Any, Tensor | bool]:
        """Returns the step's result, and whether it was skipped: known here, or by the device."""
        flag = self.overflow.pending
        if flag is None:
            return run(), False
        if not skips_in_kernel(optimizer, flag):
            if self.must_skip():
                self._enter_own_step()
                return None, True
            return run(), False
        optimizer.found_inf = flag
        try:
            return run(), flag
        finally:
            optimizer.found_inf = None  # not deleted: a GradScaler around amp deletes its own

    @untraced
    def _check_closure(self) -> None:
        """Raises RuntimeError if an overflow may end an evaluation of a closure."""
        if self.session.can_skip:
            raise RuntimeError(
                "optimizer.step got a closure, but the loss scale is dynamic: an overflow in an "
                "evaluation could not skip the step. Pass a static scale to amp.initialize, such "
                'as loss_scale=128.0, or use bf16, which needs none: opt_level="O4" or "O5". If '
                "the optimizer calls the closure once, call it before optimizer.step() instead."
            )

    def _evaluation(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the closure with amp's part: it computes the gradients, perhaps several times."""

        @untraced_frame
        def evaluate() -> Any:
            masters.round_masters(self.pairs)
            loss = closure()
            self.update_masters_with_grads()
            masters.expect_step(self.pairs)
            self.session.observer.gradients_used(self)
            return loss

        return evaluate

    @untraced
    def note_grad_scaler(self) -> None:
        """Records that torch's GradScaler is about to step the optimizer, or to unscale for it."""
        self.asked_by_grad_scaler = True

    # -- CUDA graphs -------------------------------------------------------------------------

    def keep_captured(self) -> None:
        """Keeps the gradients of a block that a CUDA graph captures, for steps after replays."""
        masters.widen_grads(self.pairs)  # later, they would move from where replays write
        models = [pair.model for pair in self.pairs]
        self._captured = [
            (param, param.grad.detach()) for param in models if param.grad is not None
        ]

    @untraced
    def _check_captured(self) -> None:
        """Checks, at a step, the gradients that a CUDA graph has captured.

        If the graph captures the step, too, later steps are not checked.

        Raises:
            RuntimeError: If the gradients were cleared, so that a replay would train nothing.
        """
        if capturing(self.params()[0].device):
            self._captured = None
            return
        for param, grad in self._captured or ():
            if param.grad is not None and masters.is_zero(param.grad):
                param.grad = grad.detach()  # zero_grad has put another tensor in its place
        if not self.has_grads():
            raise RuntimeError(
                "optimizer.step() has no gradients, although a CUDA graph has captured a "
                "scale_loss block: they were cleared after the capture, while each replay writes "
                "the same tensors. Call optimizer.zero_grad() before the capture only, or capture "
                "the step, too."
            )

    @untraced
    def _await_replay(self, captured: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Restores, after a step, what the next replay of a CUDA graph writes in place."""
        for param, grad in captured:
            param.grad = grad.detach()  # which may become fp32
        self.overflow.await_replay()

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


# -- several optimizers ----------------------------------------------------------------------------


def optimizers_of(session: Session) -> list[PreparedOptimizer]:
    """Returns the states of a session's live optimizers."""
    return [prepared for prepared in live_optimizers if prepared.session is session]


def with_sharers(prepared_optimizers: Sequence[PreparedOptimizer]) -> list[PreparedOptimizer]:
    """Returns optimizers, followed by all that share parameters with them, in any session.

    Sharing is transitive.
    """
    sharing = list(prepared_optimizers)
    others: list[PreparedOptimizer] = [*live_optimizers]
    if others == sharing:
        return sharing
    for prepared in sharing:  # which grows meanwhile
        trained = {*map(id, prepared.trained_params())}
        for other in others:
            if other not in sharing and not trained.isdisjoint(map(id, other.trained_params())):
                sharing.append(other)
    return sharing


def reachable(
    session: Session, own: Sequence[PreparedOptimizer]
) -> tuple[list[PreparedOptimizer], list[nn.Parameter]]:
    """Returns what a pass of ``own`` optimizers may reach beside their parameters.

    These are this thread's optimizers whose gradients are unscaled, and parameters that none steps.
    """
    lenders: list[PreparedOptimizer] = []
    stepped: set[int] = set()
    stepped_elsewhere: set[int] = set()
    for prepared in live_optimizers:
        trained = prepared.trained_params()
        stepped.update(map(id, trained))
        if prepared in own:
            continue
        if not prepared.is_used_here:
            stepped_elsewhere.update(map(id, trained))
        elif prepared.lends_to(session) and fsdp.reduces(trained):
            lenders.append(prepared)
    return lenders, _unowned(session, stepped, stepped_elsewhere)


def _unowned(
    session: Session, stepped: Collection[int], stepped_elsewhere: Set[int]
) -> list[nn.Parameter]:
    """Returns the trained parameters that no optimizer steps, each once.

    Those of models of this session and of others of its thread, unless another thread trains a part
    of the model.

    Args:
        session: The session of a pass.
        stepped: Ids of the parameters that an optimizer steps.
        stepped_elsewhere: Ids of those that an optimizer of another thread steps.
    """
    unowned: dict[int, nn.Parameter] = {}
    for other in Session.live:
        is_beside = other is session or other.thread is session.thread
        if not is_beside:
            continue
        for model in other.models:
            if fsdp.groups and fsdp.is_sharded(model):
                continue  # FSDP2 gathers parameters for a pass, and reduces their gradients itself
            params = params_in(model)
            if stepped_elsewhere and not stepped_elsewhere.isdisjoint(map(id, params)):
                continue
            for param in params:
                if id(param) not in stepped and is_trained(param):
                    unowned[id(param)] = param
    return [*unowned.values()]


def unscale_grads(
    prepared_optimizers: Sequence[PreparedOptimizer], scaler: Scaler, scale: Tensor | float
) -> None:
    """Unscales the gradients of a pass; those of parameters with a master become fp32."""
    params = grads_of(prepared_optimizers)
    scaler.unscale_(dtensor.values_of(params), scale)
    if scaler.dynamic:  # all ranks that hold shards must step or skip together
        dtensor.share_flag_(scaler.found_inf, params)


def grads_of(prepared_optimizers: Sequence[PreparedOptimizer]) -> Collection[nn.Parameter]:
    """Returns the parameters that optimizers train; those with a master get fp32 gradients."""
    params: dict[int, nn.Parameter] = {}  # each once, as optimizers may share some
    for prepared in prepared_optimizers:
        masters.widen_grads(prepared.pairs)
        trained = prepared.trained_params()
        params.update(zip(map(id, trained), trained, strict=True))
    return params.values()
