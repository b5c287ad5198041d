"""The session of one ``initialize`` call: policy, scalers, models and optimizers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.op_table import AutocastSpec
from apex._core.param_groups import dtypes_of, is_trained, match_states
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine.autocast.ambient import end_stale_casts
from apex._engine.autocast.region import AmbientRegion, AutocastRegion, Region
from apex._engine.autocast.user_functions import UserRegistry
from apex._engine.backward import BackwardPass
from apex._engine.conversion import casts, notes, state
from apex._engine.conversion.plan import ModelPlan
from apex._engine.conversion.subclass import hand_over, set_state
from apex._engine.ddp import DDPTracker
from apex._engine.masters import MasterTable
from apex._engine.mistakes import Mistakes
from apex._engine.optimizer import subclass, unprepared
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._engine.scaler import Readback, ScaleUpdate, scaler_for
from apex._torch import fsdp
from apex._torch.modules import named_parameters


class Session:
    """One ``initialize`` call and everything it created.

    Models and optimizers hold strong references to their session; it holds only weak references to
    them. It is collected with the last of them, and its thread's op casts end.

    Attributes:
        live: All sessions, oldest first.
        policy: What the level means: dtypes, op casts, masters and loss scale.
        scalers: One per loss.
        spec: The op casts, until they end.
        region: Turns op casts on in forward passes; off at levels without op casts. After
            :meth:`close`, it leaves them as they are.
        mistakes: The mistakes found in the training loop.
        ddp_tracker: Tracks the DistributedDataParallel wrappers of the models.
        masters: The fp32 masters of the models' parameters.
        report_overflow: Called for each overflow, at the end of the pass that reads it on the host.
        losses: Copies to the host of losses with a static scale, which are checked for inf and NaN.
            ``None`` once one was found: the warning is logged once.
        losses_given: Number of such losses so far; only a sample is copied.
    """

    live: ClassVar[weakref.WeakKeyDictionary[Session, None]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        policy: Policy,
        *,
        num_losses: int,
        rule: ScaleRule,
        spec: AutocastSpec | None,
        functions: UserRegistry,
        report_overflow: Callable[[BackwardPass, ScaleUpdate], None],
        keep_fp32: bool,
    ) -> None:
        """Makes the scalers and registers the kernels for op casts.

        Args:
            policy: What the level means.
            num_losses: Number of scalers.
            rule: The rule of dynamic scales.
            spec: The op casts; ``None`` for none.
            functions: User-registered functions, cast while the session lives.
            report_overflow: Called for each overflow.
            keep_fp32: Whether 16-bit parameters without a master keep their fp32 values.
        """
        end_stale_casts()
        self.policy = policy
        self.scalers = [scaler_for(policy.loss_scale, rule) for _ in range(num_losses)]
        self.region: Region = Region()
        if spec is not None:
            self.region = AutocastRegion(spec)
        self.spec = spec
        self._functions = functions
        self.report_overflow = report_overflow
        self._keep_fp32 = keep_fp32
        self.masters = MasterTable()
        # In the same order on all ranks, which communicate for each optimizer in turn.
        self._prepared_optimizers = weakref.WeakKeyDictionary[PreparedOptimizer, None]()
        self._models = weakref.WeakSet[nn.Module]()
        self.ddp_tracker = DDPTracker()
        # The parameter groups of fully_shard, which tell whether a pass reduces its gradients.
        self._shards: list[weakref.ref[object]] = []
        self._casts = ExitStack()  # ends the op casts
        # Another thread may be about to step what a pass in this one could reach.
        self._thread = threading.get_ident()
        self.mistakes = Mistakes()
        self.losses: Readback[int] | None = Readback()
        self.losses_given = 0
        self.live[self] = None

    # -- setting up --------------------------------------------------------------------------

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        plan: ModelPlan,
        undo: ExitStack,
    ) -> None:
        """Converts models and prepares optimizers; ``undo`` receives the inverse of each step.

        An inverse allocates no device memory: it may run because memory has run out.

        Args:
            models: Models checked by :func:`apex._engine.conversion.checks.check`.
            optimizers: Optimizers that are not prepared yet.
            plan: The conversion.
            undo: Receives the inverse.
        """
        old_dtypes = dtypes_of(optimizers)
        for model in models:
            hand_over(model, undo)
        for model in models:
            before = casts.floating_tensors(model)
            undo.callback(casts.undo_convert, model)
            link = state.MasterLink(self, plan.param_dtype)
            own_plan = plan.without_calls() if fsdp.casts(model) else plan
            set_state(model, state.ModelState(own_plan, self.region, link), undo)
            undo.callback(self.masters.release, model)
            self._make_masters(model, before, trains=bool(optimizers))
        for optimizer in optimizers:
            self.prepare_optimizer(optimizer, undo)
        undo.callback(self.close)
        self.start()
        self._models.update(models)
        if self.policy.master_weights:
            unprepared.hooks.add(self)
        match_states(optimizers, old_dtypes)
        groups = (group for model in models for group in fsdp.param_groups(model))
        self._shards += map(weakref.ref, groups)

    def _make_masters(
        self, model: nn.Module, before: Sequence[tuple[Tensor, Tensor]], *, trains: bool
    ) -> None:
        """Makes the masters of a model's trainable parameters from their values before conversion.

        Keeps the values of buffers, and with ``keep_fp32`` also of other rounded parameters.

        Args:
            model: A converted model.
            before: Tensors of the model with their values before conversion.
            trains: Whether the model was passed with optimizers.
        """
        notes.log_lost(model, before)
        has_masters = trains and self.policy.master_weights
        for tensor, exact in before:
            if not dtypes.is_low_precision(tensor):
                continue
            param = tensor if isinstance(tensor, nn.Parameter) else None
            if param is not None and has_masters and is_trained(param):
                self.masters.create(param, model, exact)
            elif exact.dtype is not tensor.dtype and (self._keep_fp32 or param is None):
                self.masters.exact[tensor] = exact.float()

    def start(self) -> None:
        """Turns op casts on in this thread, until the session ends."""
        if isinstance(self.region, AutocastRegion):
            self._functions.apply()
            self._casts.callback(self._functions.undo)
            self.region.begin_ambient()
            self._casts.callback(self.region.end)
            unprepared.hooks.add(self)
            weakref.finalize(self, self._casts.close).atexit = False

    def cast_in(self, models: Iterable[nn.Module]) -> None:
        """Turns op casts on in the forward passes of models of other sessions, too."""
        self._models.update(models)
        for model in models:
            state.set_region(model, self.region)

    def close(self) -> None:
        """Turns op casts off, in this thread and in the models' forward passes; idempotent.

        As in apex, the models run under the casts of a later session.
        """
        self.spec = None
        self._casts.close()
        if isinstance(self.region, AutocastRegion):
            self.region = AmbientRegion()
            for model in self._models:
                state.set_region(model, self.region)

    def prepare_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        """Prepares one more optimizer; ``undo`` receives the inverse."""
        prepared = PreparedOptimizer(self, self.policy.master_weights)
        prepared.attach(optimizer)
        prepared.create_missing_masters()
        undo.callback(prepared.close)
        undo.callback(subclass.unprepare_class, optimizer)
        subclass.prepare_class(optimizer, prepared)
        if self.has_scale and self.policy.low_precision is torch.float16:
            self.mistakes.observe(prepared.trained_params())

    def register(self, prepared: PreparedOptimizer) -> None:
        """Adds an optimizer's state to the session."""
        self._prepared_optimizers[prepared] = None

    @property
    def has_scale(self) -> bool:
        """Whether a loss has a scale."""
        return not all(scaler.is_identity for scaler in self.scalers)

    @property
    def can_skip(self) -> bool:
        """Whether an overflow skips steps."""
        return any(scaler.dynamic for scaler in self.scalers)

    # -- training ----------------------------------------------------------------------------

    def shares_grads(self, prepared: PreparedOptimizer) -> bool:
        """Returns whether ranks share the gradients of a pass that begins now, or need not."""
        if self.ddp_tracker.wrappers and not self.ddp_tracker.sends(prepared):
            return False
        return not (self._shards and fsdp.defers_reduction(ref() for ref in self._shards))

    def check_shards(self) -> None:
        """Raises RuntimeError if a model was sharded after it was prepared with an optimizer."""
        if not self._prepared_optimizers:
            return
        known = [ref() for ref in self._shards]
        for model in self.models:
            for group in fsdp.param_groups(model):
                if group not in known:
                    raise RuntimeError(
                        "fully_shard was called after amp.initialize, which replaces parameters: "
                        "the optimizer holds those from before and trains nothing. Call "
                        "fully_shard first, then create the optimizer, and call amp.initialize "
                        "last, at O1, O4, or O0 with a MixedPrecisionPolicy."
                    )

    def begin_forward(self, model: nn.Module) -> None:
        """Prepares the gradients of a converted model for a pass without a block."""
        under_ddp = bool(self.ddp_tracker.wrappers)
        for prepared in self._prepared_optimizers:
            # Blocks prepare the gradients themselves when they begin.
            if prepared.open_pass is not None or (under_ddp and prepared.had_block):
                return
        self.masters.prepare_plain_pass(model, under_ddp=under_ddp)

    def reuses_grad(self, param: Tensor) -> bool:
        """Returns whether the next pass writes a parameter's gradient to the same memory."""
        return self.ddp_tracker.owns_buffer(param)

    @property
    def models(self) -> list[nn.Module]:
        """The live models that are still prepared."""
        return [model for model in self._models if state.is_converted(model)]

    @property
    def prepared_optimizers(self) -> list[PreparedOptimizer]:
        """The states of the session's live optimizers."""
        return [prepared for prepared in self._prepared_optimizers if prepared.is_live]

    @classmethod
    def with_sharers(
        cls, prepared_optimizers: Sequence[PreparedOptimizer]
    ) -> list[PreparedOptimizer]:
        """Returns optimizers, followed by all that share parameters with them, in any session.

        Sharing is transitive.
        """
        sharing = list(prepared_optimizers)
        others: list[PreparedOptimizer] = []
        for session in cls.live:
            others += session._prepared_optimizers
        if others == sharing:
            return sharing
        for prepared in sharing:  # which grows meanwhile
            trained = {*map(id, prepared.trained_params())}
            for other in others:
                if other in sharing or not other.is_live:
                    continue
                if not trained.isdisjoint(map(id, other.trained_params())):
                    sharing.append(other)
        return sharing

    def others(
        self, own: Sequence[PreparedOptimizer]
    ) -> tuple[list[PreparedOptimizer], list[nn.Parameter]]:
        """Returns what a pass of ``own`` optimizers may reach beside their parameters.

        These are optimizers without an unfinished pass whose ranks share gradients now, and the
        parameters that no optimizer steps. Sessions of other threads are left alone.
        """
        lenders: list[PreparedOptimizer] = []
        unowned: dict[int, nn.Parameter] = {}
        stepped: set[int] = set()
        for session in [*self.live]:
            if session is not self and session._thread != self._thread:
                continue
            for model in session.models:
                for _, param in named_parameters(model):
                    unowned[id(param)] = param
            for prepared in session.prepared_optimizers:
                stepped.update(map(id, prepared.trained_params()))
                is_free = prepared.open_pass is None and prepared not in own
                if is_free and session.shares_grads(prepared):
                    lenders.append(prepared)
        return lenders, [param for key, param in unowned.items() if key not in stepped]

    def convert_late(self, params: Iterable[Tensor]) -> None:
        """Casts modules that were added to a model, if they hold any of these parameters."""
        unknown = {id(param) for param in params if self.masters.pair_of(param) is None}
        if not unknown:
            return
        for model in self._models:
            late = casts.convert_late(model, unknown)
            self._make_masters(model, late, trains=True)

    def forget_cleared(self, params: Iterable[Tensor]) -> None:
        """Forgets what unfinished passes hold for parameters whose gradients were cleared."""
        cleared = {*map(id, params)}
        for prepared in [*self._prepared_optimizers]:
            prepared.forget_cleared(cleared)
