"""What one ``initialize`` built: the policy, the scalers, the models and the optimizers."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Wrapper
from torch.optim import Optimizer

from apex._core import finite
from apex._core.master import copy_to_model
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine import model as conversion
from apex._engine.autocast.mixed import resolve_mixed
from apex._engine.autocast.region import CastRegion, CastSpec, UncastRegion, no_casts
from apex._engine.backward import BackwardPass
from apex._engine.events import PassEnd, ScaleUpdate
from apex._engine.model import ModelPlan, sharding
from apex._engine.optimizer import optimizer_class
from apex._engine.optimizer.binding import Binding
from apex._engine.optimizer.optimizer_class import AmpOptimizer
from apex._engine.restoring import Before, dtypes_of, match_states
from apex._engine.scaler import Scaler
from apex._torch import ddp, dtensor, ranks
from apex._torch.ddp import ALONE, Communication, Wrappers

_log = logging.getLogger("apex")

Listener = Callable[["Session", ScaleUpdate], None]

PassListener = Callable[["Session", PassEnd], None]


class Functions(Protocol):
    """The functions that a user registered for casting."""

    def apply(self) -> None:
        """Puts the casting versions in place."""

    def undo(self) -> None:
        """Puts the own versions back, when the last session that applied them ends."""


class Session:
    """One ``initialize`` call and everything it made.

    Its models and optimizers keep it alive and it keeps none of them: when they are gone, so is
    the session, and the casts of its thread end.

    Attributes:
        policy: What the level asks for.
        scalers: One per loss.
        region: Where op casts happen; switches them off for levels without.
        options: The options as the public API shows them.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        num_losses: int = 1,
        rule: ScaleRule | None = None,
        spec: CastSpec | None = None,
        functions: Functions | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        """Makes the scalers and, for op casts, registers their kernels.

        Args:
            policy: What the level asks for.
            num_losses: How many scalers.
            rule: How dynamic scales move.
            spec: The op casts; ``None`` for none.
            functions: User-registered functions, applied while the session lives.
            listeners: Called with every scale update, once it is readable on the host.
        """
        self.policy = policy
        rule = rule or ScaleRule()
        self.scalers = [
            Scaler(policy.loss_scale, rule, loss_id=index) for index in range(num_losses)
        ]
        self.region: CastRegion | UncastRegion = (
            UncastRegion() if spec is None else CastRegion(spec)
        )
        self._functions = functions if spec is not None else None
        self._listeners = tuple(listeners)
        self._pass_listeners: list[PassListener] = []
        self._bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wrappers = Wrappers()
        self._told_of_join = False
        self._shards: list[weakref.ref[object]] = []
        self._prepared: frozenset[int] = frozenset()
        self._before: dict[int, Tensor] = {}
        self._end: weakref.finalize[..., Session] | None = None
        self.options: object = None

    # -- setting up --------------------------------------------------------------------------

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        plan: ModelPlan,
        *,
        mixin: type[AmpOptimizer] = AmpOptimizer,
    ) -> None:
        """Converts the models and binds the optimizers, all or nothing.

        Args:
            models: Plain fp32 models, checked by :func:`apex._engine.model.check`.
            optimizers: Optimizers that are not bound yet.
            plan: The conversion.
            mixin: The overrides that the optimizers get.
        """
        if self.policy.master_weights:
            self._before = {id(p): p.detach() for model in models for p in model.parameters()}
        before = Before(models)
        converted: list[nn.Module] = []
        old_dtypes = dtypes_of(optimizers)
        try:
            for model in models:
                conversion.convert(model, plan, self.region, masters=self, owner=self)
                converted.append(model)
            for optimizer in optimizers:
                self._bind(optimizer, mixin)
            self.start()
            match_states(optimizers, old_dtypes)
        except BaseException:
            self._withdraw(converted, optimizers)
            before.put_back()
            raise
        finally:
            self._before = {}
        self._models.update(models)
        self._prepared = frozenset(id(p) for model in models for p in model.parameters())
        groups = (group for model in models for group in sharding.param_groups(model))
        self._shards += map(weakref.ref, groups)

    def _withdraw(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Takes back all but the tensors' values; allocates nothing, for memory may be full."""
        self.stop()
        for model in models:
            conversion.withdraw(model)
        for optimizer in optimizers:
            binding = optimizer_class.binding_of(optimizer)
            if binding is not None:
                binding.withdraw()
                optimizer_class.unbind_class(optimizer)
                self.forget(binding)

    def start(self) -> None:
        """Turns op casts on in this thread, until the session ends."""
        if isinstance(self.region, CastRegion):
            if self._functions is not None:
                self._functions.apply()
            self.region.enter_ambient()
            self._end = weakref.finalize(self, _end, self.region, self._functions)
            self._end.atexit = False

    def stop(self) -> None:
        """Turns op casts off again, here and in the models' forward passes; idempotent."""
        if self._end is not None and self._end.alive:
            self._end()
            for model in self._models:
                conversion.set_region(model, UncastRegion())

    @property
    def casting(self) -> bool:
        """Whether op casts are on: from the start to the end of a session that has them."""
        return self._end is not None and self._end.alive

    def _bind(self, optimizer: Optimizer, mixin: type[AmpOptimizer]) -> None:
        binding = Binding(
            optimizer,
            master_weights=self.policy.master_weights,
            casts_off=no_casts,
            owner=self,
            exact=self._before,
            # Only rounded weights are sent round by DistributedDataParallel, so bits beyond them
            # might differ from rank to rank.
            exact_later=ranks.world_size() > 1,
        )
        try:
            optimizer_class.bind_class(optimizer, binding, mixin)
        except BaseException:
            binding.withdraw()
            raise
        self.register(binding)

    def bind(self, optimizer: Optimizer, *, mixin: type[AmpOptimizer] = AmpOptimizer) -> None:
        """Binds one more optimizer."""
        self._bind(optimizer, mixin)

    def register(self, binding: Binding) -> None:
        """Takes in a binding that was made or copied."""
        self._bindings.add(binding)

    def forget(self, binding: Binding) -> None:
        """Lets go of a binding that was released."""
        self._bindings.discard(binding)

    # -- training ----------------------------------------------------------------------------

    def backward_pass(
        self,
        loss: Tensor,
        bindings: Sequence[Binding],
        scaler: Scaler,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> BackwardPass:
        """Returns the context of one ``scale_loss`` block.

        Raises:
            RuntimeError: If ``fully_shard`` has replaced parameters of the optimizers.
        """
        if self._prepared:
            trained = [p for b in bindings for p in b.trained() if id(p) in self._prepared]
            sharding.check_order(self._models, trained)
            self._prepared = frozenset()
        return BackwardPass(
            loss,
            bindings,
            scaler,
            casts_off=no_casts,
            python_casts=functools.partial(resolve_mixed, self.region),
            communication=self._communication,
            ended=functools.partial(self._end_pass, scaler.loss_id, bindings),
            # Gradients that fully_shard keeps back are scaled, and so is what a later pass adds.
            delay_unscale=delay_unscale or sharding.keeps_back(ref() for ref in self._shards),
            delay_overflow_check=delay_overflow_check,
        )

    def _communication(self, binding: Binding) -> Communication:
        if not self._wrappers.seen:
            return ALONE
        wrappers = self._wrappers.of(binding, binding.trained)
        if binding.untried:
            _share_masters(binding, wrappers)
        if any(map(ddp.joins, wrappers)):
            self._join(binding)
        return self._wrappers.communication(wrappers)

    def _join(self, binding: Binding) -> None:
        binding.follow_writes()
        if not self._told_of_join and any(scaler.dynamic for scaler in self.scalers):
            self._told_of_join = True
            if ranks.rank() == 0:
                _log.warning(
                    "amp: in DistributedDataParallel.join() the loss scale of a rank that is "
                    "through stays behind. After the join load one rank's amp.state_dict() on all."
                )

    def _end_pass(
        self,
        loss_id: int,
        bindings: Sequence[Binding],
        updates: Sequence[ScaleUpdate],
        failed: bool = False,
    ) -> None:
        for update in updates:
            for listener in self._listeners:
                listener(self, update)
        for pass_listener in tuple(self._pass_listeners):
            pass_listener(self, PassEnd(loss_id, updates, bindings, failed))

    def add_listener(self, listener: PassListener) -> None:
        """Calls ``listener`` at the end of every pass that moves a scale, and after an exception.

        A static scale counts as moved.
        """
        self._pass_listeners.append(listener)

    def remove_listener(self, listener: PassListener) -> None:
        """Ends that; nothing happens if it has ended."""
        if listener in self._pass_listeners:
            self._pass_listeners.remove(listener)

    @property
    def models(self) -> list[nn.Module]:
        """The models that live and are still prepared."""
        return [model for model in self._models if conversion.is_converted(model)]

    # -- what the models ask -----------------------------------------------------------------

    def exact(self) -> Mapping[int, Tensor]:
        """Returns the fp32 values behind low-precision parameters, by ``id`` of the parameter."""
        exact = dict(self._before)
        for binding in self._bindings:
            exact.update(binding.exact())
        return exact

    @torch.no_grad()
    def set_exact(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets the masters of parameters, in every optimizer that has one, to fp32 values."""
        written: set[int] = set()
        masters: dict[int, list[Tensor]] = {}
        for binding in self._bindings:
            for pair in binding.pairs:
                masters.setdefault(id(pair.model), []).append(pair.master)
        try:
            for param, value in values:
                for master in masters.get(id(param), ()):
                    master.copy_(value)
                written.add(id(param))
        except BaseException:
            # Half loaded: the parameters go back to their masters, so that both agree again.
            for binding in self._bindings:
                if not binding.untried:
                    copy_to_model(binding.pairs)
            raise
        for binding in self._bindings:
            binding.forget_exact(written)

    def runs_under(self, wrapper: Wrapper, *, traced: bool = False) -> None:
        """Takes note that a model's forward pass begins, or is traced, under a wrapper."""
        self._wrappers.note(wrapper, traced=traced)

    def convert_late(self, params: Iterable[Tensor]) -> Mapping[int, Tensor]:
        """Casts what was added to a model since, where ``params`` are among its parameters.

        Returns:
            The values that ``params`` had before, by ``id`` of the parameter.
        """
        self._wrappers.forget_users()  # the optimizer may have got parameters of another wrapper
        before = {id(param): param.detach() for param in params}
        for model in self._models:
            if any(id(param) in before for param in model.parameters()):
                conversion.convert_late(model)
        return before

    def clear_grads(self, params: Iterable[Tensor], *, set_to_none: bool) -> None:
        """Clears the gradients of the masters of ``params``, when a model's are cleared."""
        cleared = {id(param) for param in params}
        for binding in self._bindings:
            binding.clear(cleared, set_to_none=set_to_none)

    def nonfinite_gradients(self, only: Binding | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields name and gradient of every parameter whose gradient holds inf or NaN.

        Waits for the device: for a diagnosis, never in a normal step.

        Args:
            only: The optimizer whose parameters to look at; ``None`` for all.
        """
        names = {id(p): name for model in self._models for name, p in model.named_parameters()}
        for binding in self._bindings if only is None else (only,):
            models = {id(pair.master): pair.model for pair in binding.pairs}
            for param in binding.params():
                # The step has cleared a master's; the model's own is left, still scaled.
                grad = models.get(id(param), param).grad if param.grad is None else param.grad
                if grad is None:
                    continue
                values = finite.summed_values(dtensor.local(grad))
                if not bool(torch.isfinite(values).all()):  # sync: a diagnosis after 50 skips
                    own = models.get(id(param), param)
                    yield names.get(id(own), "(a parameter of no initialized model)"), values


def _share_masters(binding: Binding, wrappers: Iterable[Wrapper]) -> None:
    sent = {w: ddp.sent_params(w) for w in wrappers if not ddp.joins(w)}
    binding.take_over_changes(shared=set().union(*sent.values()))
    for wrapper, params in sent.items():
        masters = [pair.master for pair in binding.pairs if id(pair.model) in params]
        ddp.share(masters, wrapper)


def _end(region: CastRegion, functions: Functions | None) -> None:
    region.leave_ambient()
    if functions is not None:
        functions.undo()
