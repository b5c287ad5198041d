"""The training loops that tools watch: of ``amp.initialize``, or plain torch."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core.param_groups import params_of
from apex._engine.events import PassEnd, ScaleUpdate
from apex._engine.model import module_behind
from apex._engine.optimizer.binding import Binding
from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.readback import Readback
from apex._engine.session import Session
from apex._torch import grad_scaler
from apex._torch.copies import moved
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.dynamo import untraced
from apex.debug.arguments import check_scaler, checked_models, inner
from apex.debug.module_tracker import unwrapped

StepHook = Callable[..., None]
"""Takes the optimizer, and the arguments of its step."""


class LoopPass(NamedTuple):
    """One backward pass of a session, or one step of an optimizer in a plain loop.

    Attributes:
        loss_id: Index of the session's loss; in a plain loop, of the optimizer.
        updates: Scale updates that have arrived on the host by now.
        measured: What the listener's ``measure`` returned for the unscaled gradients.
        loss_scale: The scale after the pass: 0-d, on the device.
        found_inf: Above 0 if the step is skipped: 0-d, on the device.
        failed: Whether an exception ended it.
    """

    loss_id: int
    updates: Sequence[ScaleUpdate]
    measured: Tensor | None
    loss_scale: Tensor
    found_inf: Tensor
    failed: bool = False


class Listener(Protocol):
    """What a tool does at each pass."""

    def measure(self, loss_id: int, params: Iterable[Tensor]) -> Tensor | None:
        """Returns numbers about the gradients of ``params``, linear in them; None for nothing.

        Some of ``params`` may have no gradient.
        """

    def end_of_pass(self, end: LoopPass) -> None:
        """Called once the scale is updated."""


class Loop(ABC):
    """A training loop.

    Holds models and optimizers weakly.

    Attributes:
        dynamic: Whether an overflow skips a step.
        unit: What a pass is, in messages.
        remedy: How to have steps on non-finite gradients skipped.
        may_underflow: Whether gradients may be computed in fp16.
        keeps_fp32: How to keep weights in fp32.
        scales: How to keep gradients in fp16's range.
    """

    dynamic: bool
    unit: str
    remedy: str
    may_underflow: bool
    keeps_fp32: str
    scales: str

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = weakref.WeakSet(map(module_behind, models))
        self._listener: Listener | None = None
        self._ends: list[Callable[[], None]] = []
        self._in_hook = False

    @abstractmethod
    def listen(self, listener: Listener) -> None:
        """Starts to call ``listener``, the only one."""

    def add_step_hooks(self, before: StepHook | None, after: StepHook | None) -> None:
        """Calls functions around every step of the optimizers, until ``stop``."""
        for optimizer in self.optimizers:
            if before is not None:
                self._ends.append(optimizer.register_step_pre_hook(before).remove)
            if after is not None:
                self._ends.append(optimizer.register_step_post_hook(after).remove)

    def stop(self) -> None:
        """Stops calling the listener, and removes all hooks; idempotent.

        Hooks stay if this is called in one of them, over which torch is iterating.
        """
        self._listener = None
        while self._ends and not self._in_hook:
            self._ends.pop()()

    @property
    @abstractmethod
    def optimizers(self) -> list[Optimizer]:
        """The live optimizers."""

    @property
    def models(self) -> list[nn.Module]:
        """The live models."""
        return list(self._models)

    @property
    def in_fp16(self) -> bool:
        """Whether gradients are known to be computed in fp16."""
        return self.may_underflow

    @abstractmethod
    def gradient_scale(self, optimizer: Optimizer) -> Tensor | None:
        """Returns the factor by which the gradients, unscaled now, were scaled; None for 1."""

    def params(self) -> list[Tensor]:
        """Returns the parameters that the optimizers step."""
        return [param for optimizer in self.optimizers for param in params_of(optimizer)]

    def names(self) -> dict[int, str]:
        """Returns names by the ids of the stepped parameters.

        A master has the name of its weight. A parameter of no known model has the name that the
        optimizer was given, or its position.
        """
        found: dict[int, str] = {}
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                given = group.get("param_names") or [
                    f"parameter {place} of group {index}" for place in range(len(group["params"]))
                ]
                found |= {id(p): name for p, name in zip(group["params"], given, strict=False)}
        found |= {id(p): name for m in self.models for name, p in unwrapped(m).named_parameters()}
        for optimizer in self.optimizers:
            binding = binding_of(optimizer)
            for pair in () if binding is None else binding.pairs:
                if id(pair.model) in found:
                    found[id(pair.master)] = found[id(pair.model)]
        return found


class _AmpLoop(Loop):
    """The loop of one ``amp.initialize`` call."""

    unit = "backward pass"
    remedy = "To skip such steps, pass loss_scale='dynamic' to amp.initialize."
    keeps_fp32 = "Use a level with fp32 masters ('O2', 'O5')"
    scales = "Pass loss_scale='dynamic' to amp.initialize, or use a bf16 level ('O4', 'O5')"

    def __init__(
        self, session: Session, models: Iterable[nn.Module], only: Iterable[Binding] | None
    ) -> None:
        """``only`` are the optimizers to watch; None for all that the session has."""
        super().__init__(models)
        self.dynamic = any(scaler.dynamic for scaler in session.scalers)
        self.may_underflow = session.policy.low_precision is torch.float16
        self._session = weakref.ref(session)
        self._only = None if only is None else weakref.WeakSet(only)

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        cast(Session, self._session()).add_listener(self._end_of_pass)
        self._ends.append(self._end_listening)

    def _end_listening(self) -> None:
        session = self._session()
        if session is not None:
            session.remove_listener(self._end_of_pass)

    @property
    def _bindings(self) -> list[Binding]:
        session = self._session()
        bindings = () if session is None else session.bindings
        return [each for each in bindings if self._only is None or each in self._only]

    @property
    def optimizers(self) -> list[Optimizer]:
        return [binding.optimizer for binding in self._bindings]

    def gradient_scale(self, optimizer: Optimizer) -> Tensor | None:
        session = self._session()
        return None if session is None else session.scalers[0].loss_scale

    def _end_of_pass(self, session: Session, end: PassEnd) -> None:
        own = [binding for binding in self._bindings if binding in end.bindings]
        if not own or self._listener is None:
            return
        params = (param for binding in own for param in binding.params())
        measured = None if end.failed else self._listener.measure(end.loss_id, params)
        scaler = session.scalers[end.loss_id]
        state = scaler.loss_scale, scaler.found_inf
        self._listener.end_of_pass(
            LoopPass(end.loss_id, end.updates, measured, *state, failed=end.failed)
        )


class _PlainLoop(Loop):
    """A loop of plain torch, under ``torch.autocast``, with a 16-bit model, or in fp32.

    A pass is a step of one of the optimizers. With a ``GradScaler`` it ends with
    ``scaler.update()``, skipped steps included.
    """

    unit = "step"
    remedy = (
        "To skip such steps, call optimizer.step() only if the norm that clip_grad_norm_ returns "
        "is finite."
    )
    keeps_fp32 = (
        "Keep the weights in fp32 and compute under torch.autocast, or use amp.initialize(model, "
        "optimizer, opt_level='O5'), which keeps fp32 masters"
    )
    scales = (
        "Scale the loss with torch.amp.GradScaler, or use torch.autocast(device_type, "
        "dtype=torch.bfloat16)"
    )

    def __init__(
        self, optimizers: Sequence[Optimizer], scaler: Any, models: Iterable[nn.Module]
    ) -> None:
        super().__init__(models)
        self.dynamic = scaler is not None and scaler.is_enabled()
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._scaler: Callable[[], Any] = weakref.ref(scaler) if self.dynamic else lambda: None
        self._measured: dict[int | None, Tensor | None] = {}  # since the scale was updated
        self._readback: Readback[int] = Readback()
        self._skipped_in_row: dict[int, int] = {}
        self._warned = False

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        scaler = self._scaler()
        if scaler is None:
            self.add_step_hooks(None, self._after_step)
        else:
            self._ends.append(grad_scaler.Watch(scaler, self).stop)
            self.add_step_hooks(self._before_step, None)

    @property
    def optimizers(self) -> list[Optimizer]:
        found = (reference() for reference in self._optimizers)
        return [optimizer for optimizer in found if optimizer is not None]

    @property
    def in_fp16(self) -> bool:
        return self.dynamic or any(param.dtype is torch.float16 for param in self.params())

    may_underflow = True  # nobody says in which dtype torch.autocast computes

    def gradient_scale(self, optimizer: Optimizer) -> Tensor | None:
        scaler = self._scaler()
        if scaler is None or getattr(optimizer, "grad_scale", None) is not None:
            return None  # the optimizer itself unscales in its step
        return grad_scaler.current_scale(scaler)

    # -- with a GradScaler, as its ScalerListener -------------------------------------------------

    @untraced
    def gradients_complete(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        index, measured = self._index(optimizer), None
        if index is not None and self._listener is not None:
            measured = self._listener.measure(index, params_of(inner(optimizer)))
            if measured is not None and scale is not None:
                with suspend_modes():
                    measured = measured / moved(scale, measured.device)
        self._measured[index] = measured

    def scale_updated(self, steps: Sequence[tuple[Optimizer, Tensor]], scale: Tensor) -> None:
        measured, self._measured = self._measured, {}
        for optimizer, found_inf in steps:
            index = self._index(optimizer)
            if index is None or self._listener is None:
                continue
            with suspend_modes():
                self._readback.send(index, torch.stack([scale, found_inf]))
            updates = [self._update(i, *values) for i, values in self._readback.poll()]
            end = LoopPass(index, updates, measured.get(index), scale, found_inf)
            self._listener.end_of_pass(end)

    @untraced
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        scaler = self._scaler()
        if self._warned or scaler is None or self._index(optimizer) in self._measured:
            return
        if grad_scaler.current_scale(scaler) is None:  # no loss was scaled yet
            return
        self._warned = True
        warnings.warn(
            "amp.debug does not record this optimizer.step(): the GradScaler given to it has not "
            "unscaled the gradients. If they come from scaler.scale(loss), they are too large by "
            "the loss scale, and inf or NaN is not skipped: call scaler.step(optimizer), then "
            "scaler.update().",
            stacklevel=4,
        )

    def _update(self, index: int, loss_scale: float, found_inf: float) -> ScaleUpdate:
        overflow = found_inf != 0.0
        in_row = self._skipped_in_row.get(index, 0) + 1 if overflow else 0
        self._skipped_in_row[index] = in_row
        return ScaleUpdate(index, loss_scale, overflow, 1, in_row)

    # -- without ----------------------------------------------------------------------------------

    @untraced
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        index = self._index(optimizer)
        if index is None or self._listener is None:
            return
        if binding_of(optimizer) is not None:
            self._listener = None
            warnings.warn(
                "amp.debug stops watching an optimizer that amp.initialize has since prepared: it "
                "does not know its loss scale. Call History and arm after amp.initialize.",
                stacklevel=4,
            )
            return
        measured = self._listener.measure(index, params_of(optimizer))
        device = torch.device("cpu") if measured is None else measured.device
        with suspend_modes():
            one, zero = torch.ones((), device=device), torch.zeros((), device=device)
        self._in_hook = True
        try:
            self._listener.end_of_pass(LoopPass(index, (), measured, one, zero))
        finally:
            self._in_hook = False

    # -- both --------------------------------------------------------------------------------------

    def _index(self, optimizer: Any) -> int | None:
        try:
            own = inner(optimizer)
        except TypeError:  # a GradScaler takes whatever has param_groups
            return None
        found = (i for i, reference in enumerate(self._optimizers) if reference() is own)
        return next(found, None)


def loop_of(
    caller: str,
    optimizers: Sequence[Any],
    *,
    scaler: Any = None,
    models: nn.Module | Sequence[nn.Module] | None = None,
    only: bool = True,
) -> Loop:
    """Returns the loop that steps ``optimizers``.

    Args:
        caller: Name of the public function, for error messages.
        optimizers: Optimizers or wrappers of them, all prepared by one ``amp.initialize`` call or
            all plain.
        scaler: The ``GradScaler`` of a plain loop; None without one.
        models: Models that provide names; by default those of the session.
        only: Whether to watch no other optimizers of the session.

    Raises:
        TypeError: If ``scaler`` is not a ``GradScaler``, or a model is not a module.
        ValueError: If the optimizers belong to several loops, or have a session and a ``scaler``.
    """
    check_scaler(caller, scaler)
    models = None if models is None else checked_models(caller, models)
    own = [inner(optimizer) for optimizer in optimizers]
    bindings = [binding for o in own if (binding := binding_of(o)) is not None]
    if not bindings:
        return _PlainLoop(own, scaler, models or ())
    sessions = {binding.owner for binding in bindings}
    if None in sessions:
        raise RuntimeError(
            f"amp.debug.{caller} got an optimizer from a file or copy whose amp session is gone. "
            "Pass it to amp.initialize(model, optimizer) and use the one returned."
        )
    if len(bindings) < len(own) or len(sessions) > 1:
        raise ValueError(
            f"amp.debug.{caller} got optimizers from different amp.initialize calls, whose loss "
            "ids overlap, or some that amp has not prepared. Make one for each call."
        )
    if scaler is not None:
        raise ValueError(
            f"amp.debug.{caller} got a GradScaler and an optimizer that amp.initialize has "
            "prepared, which has a loss scale of its own. Leave out scaler=."
        )
    session = cast(Session, sessions.pop())
    return _AmpLoop(
        session, session.models if models is None else models, bindings if only else None
    )
