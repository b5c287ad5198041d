"""The session of one ``initialize`` call: policy, scalers, models and optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.op_table import AutocastSpec
from apex._core.param_groups import is_trained
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine import conversion
from apex._engine.autocast.ambient import settle
from apex._engine.autocast.region import AutocastRegion, NoAutocastRegion
from apex._engine.autocast.user_functions import UserRegistry
from apex._engine.backward import BackwardPass
from apex._engine.conversion import ModelPlan
from apex._engine.ddp import DDPTracker
from apex._engine.masters import LazyMaster, Master, MasterTable
from apex._engine.mistakes import Mistakes
from apex._engine.optimizer import subclass, unprepared
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._engine.restore import dtypes_of, match_states
from apex._engine.scaler import PassEnd, Readback, Scaler, ScaleUpdate, scaler_for
from apex._torch import fsdp

Listener = Callable[["Session", PassEnd], None]
"""Called with the session that scaled, after a pass that updates a scale or raises an exception."""


class Session:
    """One ``initialize`` call and everything it created.

    Its models and optimizers keep it alive, but not the reverse. Once they are gone, so is the
    session, and its thread's op casts end.

    Attributes:
        policy: The level, in today's terms.
        scalers: One per loss.
        region: Turns op casts on in forward passes; off at levels without op casts.
        mistakes: The mistakes found in the training loop.
        ddp_tracker: Knows the DistributedDataParallel wrappers of the models.
        masters: The fp32 masters of the models' parameters.
        losses: Losses that no scale watches, on their way to the host; ``None`` once one was inf or
            NaN.
        losses_given: How many there were.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        num_losses: int = 1,
        rule: ScaleRule | None = None,
        spec: AutocastSpec | None = None,
        functions: UserRegistry | None = None,
        listeners: Sequence[Listener] = (),
        keep_fp32: bool = False,
    ) -> None:
        """Makes the scalers and registers the kernels for op casts.

        Args:
            policy: The level, in today's terms.
            num_losses: Number of scalers.
            rule: The rule of dynamic scales.
            spec: The op casts; ``None`` for none.
            functions: User-registered functions, cast while the session lives.
            listeners: Called after every pass of the session's optimizers.
            keep_fp32: Whether 16-bit parameters without a master keep their fp32 values.
        """
        settle()
        self.policy = policy
        rule = rule or ScaleRule()
        self.scalers = [
            scaler_for(policy.loss_scale, rule, loss_id=index) for index in range(num_losses)
        ]
        self.region: AutocastRegion | NoAutocastRegion = (
            NoAutocastRegion() if spec is None else AutocastRegion(spec)
        )
        self._functions = functions if spec is not None else None
        self._listeners = list(listeners)
        self._keep_fp32 = keep_fp32
        lazy = all(scaler.is_identity for scaler in self.scalers)
        self.masters = MasterTable(LazyMaster if lazy else Master)
        self._prepared_optimizers: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.ddp_tracker = DDPTracker(self.scalers, self.masters)
        self._shards: list[weakref.ref[object]] = []
        self._end: weakref.finalize[..., Session] | None = None
        self.mistakes = Mistakes()
        self.losses: Readback[int] | None = Readback()
        self.losses_given = 0

    # -- setting up --------------------------------------------------------------------------

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        plan: ModelPlan,
        undo: ExitStack,
    ) -> None:
        """Converts the models and binds the optimizers; ``undo`` receives the inverse of each step.

        An inverse allocates no device memory: it may run because memory has run out.

        Args:
            models: Models checked by :func:`apex._engine.conversion.check`.
            optimizers: Optimizers that are not bound yet.
            plan: The conversion.
            undo: Receives the inverse.
        """
        old_dtypes = dtypes_of(optimizers)
        for model in models:
            conversion.hand_over(model, undo)
        for model in models:
            self._convert(model, plan, undo, trains=bool(optimizers))
        for optimizer in optimizers:
            self.bind(optimizer, undo)
        undo.callback(self.close)
        self.start()
        self._models.update(models)
        if self.policy.master_weights:
            unprepared.hooks.add(self)
        match_states(optimizers, old_dtypes)
        groups = (group for model in models for group in fsdp.param_groups(model))
        self._shards += map(weakref.ref, groups)

    def _convert(self, model: nn.Module, plan: ModelPlan, undo: ExitStack, *, trains: bool) -> None:
        before = conversion.floating_tensors(model)
        undo.callback(conversion.undo_convert, model)
        conversion.convert(model, plan, self.region, self, undo)
        undo.callback(self.masters.release, model)
        self._make_masters(model, before, trains=trains)

    def _make_masters(
        self, model: nn.Module, before: Sequence[tuple[Tensor, Tensor]], *, trains: bool
    ) -> None:
        """Makes the masters of a model's trainable parameters from their values before conversion.

        Keeps these values of buffers, and with ``keep_fp32`` those of other rounded parameters.

        Args:
            model: A converted model.
            before: Tensors of the model with their values before conversion.
            trains: Whether the model was passed with optimizers.
        """
        conversion.log_lost(model, before)
        kept: list[tuple[Tensor, Tensor]] = []
        has_masters = trains and self.policy.master_weights
        for tensor, exact in before:
            if not dtypes.is_low_precision(tensor):
                continue
            param = tensor if isinstance(tensor, nn.Parameter) else None
            if param is not None and has_masters and is_trained(param):
                self.masters.make(param, model, exact)
            elif exact.dtype is not tensor.dtype and (self._keep_fp32 or param is None):
                kept.append((tensor, exact.to(torch.float32)))
        self.masters.keep(kept, model)

    def start(self) -> None:
        """Turns op casts on in this thread, until the session ends."""
        if isinstance(self.region, AutocastRegion):
            if self._functions is not None:
                self._functions.apply()
            self.region.enter_ambient()
            unprepared.hooks.add(self)
            self._end = weakref.finalize(self, _end, self.region, self._functions)
            self._end.atexit = False

    def close(self) -> None:
        """Turns op casts off, in this thread and in the models' forward passes; idempotent."""
        if self._end is not None and self._end.alive:
            self._end()
            for model in self._models:
                conversion.set_region(model, NoAutocastRegion())

    @property
    def casting(self) -> bool:
        """Whether the session has op casts and has not ended."""
        return self._end is not None and self._end.alive

    @property
    def deactivated(self) -> bool:
        """Whether the session's op casts have ended before it."""
        return self._end is not None and not self._end.alive

    def bind(self, optimizer: Optimizer, undo: ExitStack) -> None:
        """Binds one more optimizer; ``undo`` receives the inverse."""
        prepared = PreparedOptimizer(optimizer, self)
        undo.callback(prepared.close)
        undo.callback(self.forget, prepared)
        undo.callback(subclass.unprepare_class, optimizer)
        subclass.prepare_class(optimizer, prepared)
        self.register(prepared)

    def register(self, prepared: PreparedOptimizer) -> None:
        self._prepared_optimizers.add(prepared)

    @property
    def can_skip(self) -> bool:
        return any(scaler.dynamic for scaler in self.scalers)

    @property
    def needs_scale(self) -> bool:
        scaled = any(not scaler.is_identity for scaler in self.scalers)
        return scaled and self.policy.low_precision is torch.float16

    def forget(self, prepared: PreparedOptimizer) -> None:
        self._prepared_optimizers.discard(prepared)

    # -- training ----------------------------------------------------------------------------

    def backward_pass(
        self,
        loss: Tensor,
        prepared_optimizers: Sequence[PreparedOptimizer],
        scaler: Scaler,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> BackwardPass:
        """Returns the context of one ``scale_loss`` block, of optimizers of any sessions."""
        settle()
        owners: dict[Any, None] = {
            self: None,
            **{prepared.session: None for prepared in prepared_optimizers},
        }
        regions = [owner.region for owner in owners if owner.casting] or [self.region]
        # Gradients stay scaled until ranks share them: later passes add scaled ones.
        sends = [  # of each, as ranks may communicate here
            each.session is None or each.session.ddp_tracker.sends(each)
            for each in prepared_optimizers
        ]
        delays = delay_unscale or not all(sends)
        sharing, others = [*prepared_optimizers], list[PreparedOptimizer]()
        for owner in owners:
            delays = delays or fsdp.defers_reduction(ref() for ref in owner._shards)
            for other, shares in owner.others(prepared_optimizers):
                (sharing if shares else others).append(other)
        return BackwardPass(
            loss,
            sharing,
            scaler,
            casts=regions[0].spec if isinstance(regions[0], AutocastRegion) else None,
            mistakes=self.mistakes,
            ended=functools.partial(self._end_pass, scaler.loss_id, prepared_optimizers, owners),
            others=others,
            delay_unscale=delays,
            delay_overflow_check=delay_overflow_check,
        )

    def _end_pass(
        self,
        loss_id: int,
        prepared_optimizers: Sequence[PreparedOptimizer],
        owners: Iterable[Session],
        updates: Sequence[ScaleUpdate],
        failed: bool = False,
    ) -> None:
        end = PassEnd(loss_id, updates, prepared_optimizers, failed)
        for listener in dict.fromkeys(each for owner in owners for each in owner._listeners):
            listener(self, end)

    def add_listener(self, listener: Listener) -> None:
        """Calls ``listener`` after every pass of the session's optimizers."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Removes ``listener``; idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def models(self) -> list[nn.Module]:
        """The live models that are still prepared."""
        return [model for model in self._models if conversion.is_converted(model)]

    @property
    def prepared_optimizers(self) -> list[PreparedOptimizer]:
        """The prepared_optimizers of the session's live optimizers, copies included."""
        return [prepared for prepared in self._prepared_optimizers if prepared.is_live]

    def others(
        self, prepared_optimizers: Sequence[PreparedOptimizer]
    ) -> Iterator[tuple[PreparedOptimizer, bool]]:
        """Yields every other optimizer, and whether it trains a parameter of these."""
        if (
            len(self._prepared_optimizers) == 1
            and len(prepared_optimizers) == 1
            and prepared_optimizers[0].session is self
        ):
            return
        trained = {id(param) for prepared in prepared_optimizers for param in prepared.trained()}
        for each in self.prepared_optimizers:
            if each not in prepared_optimizers:
                yield each, not trained.isdisjoint(map(id, each.trained()))

    def convert_late(self, params: Iterable[Tensor]) -> None:
        unknown = {id(param) for param in params if self.masters.pair_of(param) is None}
        for model in self._models if unknown else ():
            late = conversion.convert_late(model, unknown)
            self._make_masters(model, late, trains=True)

    def clear_grads(self, params: Iterable[Tensor], *, set_to_none: bool) -> None:
        """Clears the gradients of the masters of ``params``, whose own were cleared."""
        cleared = self.masters.clear_grads({*map(id, params)}, set_to_none=set_to_none)
        for prepared in self.prepared_optimizers:
            prepared.note_cleared(cleared)


def _end(region: AutocastRegion, functions: UserRegistry | None) -> None:
    region.leave_ambient()
    if functions is not None:
        functions.undo()
