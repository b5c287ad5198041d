"""What one ``initialize`` built: the policy, the scalers, the models and the optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import nested, ranks
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine import convert, optimizer_class
from apex._engine.backward import BackwardPass
from apex._engine.binding import Binding
from apex._engine.casting import CastRegion, CastSpec, UncastRegion, no_casts
from apex._engine.convert import ModelPlan
from apex._engine.events import ScaleUpdate
from apex._engine.optimizer_class import AmpOptimizer
from apex._engine.scaler import Scaler

Listener = Callable[["Session", ScaleUpdate], None]


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
        self._bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
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
            models: Plain fp32 models, checked by :func:`apex._engine.convert.check`.
            optimizers: Optimizers that are not bound yet.
            plan: The conversion.
            mixin: The overrides that the optimizers get.
        """
        # Among several ranks only the rounded weights are sent round by DistributedDataParallel, so
        # bits beyond them would differ from rank to rank.
        if self.policy.master_weights and ranks.world_size() == 1:
            self._before = {id(p): p.detach() for model in models for p in model.parameters()}
        before = _Before(models)
        converted: list[nn.Module] = []
        dtypes = _dtypes(optimizers)
        try:
            for model in models:
                convert.convert(model, plan, self.region, masters=self, owner=self)
                converted.append(model)
            for optimizer in optimizers:
                self._bind(optimizer, mixin)
            self.start()
            for optimizer in optimizers:
                _match_state(optimizer, dtypes)
        except BaseException:
            self.stop()
            restore(converted, optimizers)
            before.put_back()
            raise
        finally:
            self._before = {}
        self._models.update(models)

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
                convert.set_region(model, UncastRegion())

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
        )
        try:
            optimizer_class.bind_class(optimizer, binding, mixin)
        except BaseException:
            binding.release()
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
        """Returns the context of one ``scale_loss`` block."""
        return BackwardPass(
            loss,
            bindings,
            scaler,
            casts_off=no_casts,
            report=self._report,
            delay_unscale=delay_unscale,
            delay_overflow_check=delay_overflow_check,
        )

    def _report(self, updates: Sequence[ScaleUpdate]) -> None:
        for update in updates:
            for listener in self._listeners:
                listener(self, update)

    # -- what the models ask -----------------------------------------------------------------

    def exact(self) -> Mapping[int, Tensor]:
        """Returns the fp32 values behind low-precision parameters, by ``id`` of the parameter."""
        masters = {id(pair.model): pair.master for b in self._bindings for pair in b.pairs}
        return {**self._before, **masters}

    def clear_grads(self, params: Iterable[Tensor], *, set_to_none: bool) -> None:
        """Clears the gradients of the masters of ``params``, when a model's are cleared."""
        cleared = {id(param) for param in params}
        for binding in self._bindings:
            binding.clear(cleared, set_to_none=set_to_none)

    def nonfinite_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and gradient of every parameter whose gradient holds inf or NaN.

        Waits for the device: for a diagnosis, never in a normal step.
        """
        names = {id(p): name for model in self._models for name, p in model.named_parameters()}
        for binding in self._bindings:
            models = {id(pair.master): pair.model for pair in binding.pairs}
            for param in binding.params():
                grad = param.grad
                if grad is None:
                    continue
                values = grad.coalesce().values() if grad.is_sparse else grad
                if not bool(torch.isfinite(values).all()):  # sync: a diagnosis after 50 skips
                    own = models.get(id(param), param)
                    yield names.get(id(own), "(a parameter of no initialized model)"), values


class _Before:
    """What models hold before they are converted, to the last bit."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Keeps the storages of parameters, buffers and gradients; copies nothing."""
        self._held = [
            (tensor, tensor.data, tensor.grad if tensor.is_leaf else None)
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
        ]

    def put_back(self) -> None:
        """Gives every tensor its own again."""
        for tensor, data, grad in self._held:
            if tensor.is_leaf:
                tensor.grad = None  # a gradient of another dtype than its tensor is refused
            tensor.data = data
            if grad is not None:
                tensor.grad = grad


def restore(models: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Makes converted models and bound optimizers plain fp32 objects again.

    The optimizers step the models' own parameters, which have the masters' values, and keep their
    state.
    """
    dtypes = _dtypes(optimizers)
    for model in models:
        convert.restore(model)
    for optimizer in optimizers:
        binding = optimizer_class.binding_of(optimizer)
        if binding is None:
            continue
        binding.release()
        optimizer_class.unbind_class(optimizer)
        if binding.owner is not None:
            binding.owner.forget(binding)
        _match_state(optimizer, dtypes)


def _dtypes(optimizers: Iterable[Optimizer]) -> dict[int, torch.dtype]:
    return {
        id(p): p.dtype for opt in optimizers for group in opt.param_groups for p in group["params"]
    }


def _match_state(optimizer: Optimizer, before: Mapping[int, torch.dtype]) -> None:
    """Casts the state of parameters that were converted in place (O3), as torch's kernels want."""
    for param, state in optimizer.state.items():
        old = before.get(id(param), param.dtype)
        if old is param.dtype:
            continue

        def follow(value: Tensor, old: torch.dtype = old, new: torch.dtype = param.dtype) -> Tensor:
            # 0-d tensors are step counts, which stay exact.
            return value.to(new) if value.dtype is old and value.dim() > 0 else value

        for name, value in state.items():
            state[name] = nested.map_tensors(follow, value)


def _end(region: CastRegion, functions: Functions | None) -> None:
    region.leave_ambient()
    if functions is not None:
        functions.undo()
