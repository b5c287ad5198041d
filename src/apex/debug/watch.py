"""Watches the passes of a training loop: ``History`` records them, ``arm`` traces a bad one."""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from apex._core import finite
from apex._core.arguments import integer
from apex._core.foreach import norms
from apex._core.param_groups import params_of
from apex._engine.events import PassEnd, ScaleUpdate
from apex._engine.model import module_behind
from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.readback import Readback
from apex._engine.session import Session
from apex._torch import dtensor, grad_scaler, ranks
from apex._torch.copies import moved
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.dynamo import untraced
from apex.debug.common import check_scaler, checked_models, counted, inner, listed, percent
from apex.debug.overflow import OverflowTrace
from apex.debug.place import Finding, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger("apex")


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
        """Returns numbers about the gradients of ``params``, linear in them; None for nothing."""

    def end_of_pass(self, end: LoopPass) -> None:
        """Called once the scale is updated."""


class Loop:
    """A training loop, of one ``amp.initialize`` call or of plain torch.

    In a plain loop, a pass is a step of one of the optimizers; with a ``GradScaler`` it ends with
    ``scaler.update()``, skipped steps included. Holds models and optimizers weakly.

    Attributes:
        dynamic: Whether an overflow skips a step.
        unit: What a pass is, in messages.
        remedy: How to have steps on non-finite gradients skipped.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        models: Iterable[nn.Module],
        *,
        session: Session | None = None,
        scaler: Any = None,
    ) -> None:
        self._models = weakref.WeakSet(map(module_behind, models))
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._session: Callable[[], Session | None] = lambda: None
        self._scaler: Callable[[], Any] = lambda: None
        self.dynamic = scaler is not None and scaler.is_enabled()
        self.unit, self.remedy = "step", _BY_CLIPPING
        if session is not None:
            self._session = weakref.ref(session)
            self.dynamic = any(each.dynamic for each in session.scalers)
            self.unit, self.remedy = "backward pass", _BY_SCALE
        elif self.dynamic:
            self._scaler = weakref.ref(scaler)
        self._listener: Listener | None = None
        self._ends: list[Callable[[], None]] = []
        self._in_hook = False
        self._measured: dict[int, Tensor | None] = {}  # since the scale was updated
        self._readback: Readback[int] = Readback()
        self._skipped_in_row: dict[int, int] = {}

    def listen(self, listener: Listener) -> None:
        """Starts to call ``listener``, the only one."""
        self._listener = listener
        session, scaler = self._session(), self._scaler()
        if session is not None:
            session.add_listener(self._end_of_pass)
            self._ends.append(self._end_listening)
            return
        if scaler is not None:
            self._ends.append(grad_scaler.on_update(scaler, self._before_update, self._updated))
        for optimizer in self.optimizers:
            if scaler is None:
                handle = optimizer.register_step_post_hook(self._after_step)
            else:
                handle = optimizer.register_step_pre_hook(self._before_step)
            self._ends.append(handle.remove)

    def stop(self) -> None:
        """Stops calling the listener, and removes all hooks; idempotent.

        Hooks stay if this is called in one of them, over which torch is iterating.
        """
        self._listener = None
        while self._ends and not self._in_hook:
            self._ends.pop()()

    def _end_listening(self) -> None:
        session = self._session()
        if session is not None:
            session.remove_listener(self._end_of_pass)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The live optimizers."""
        return [each for reference in self._optimizers if (each := reference()) is not None]

    @property
    def models(self) -> list[nn.Module]:
        """The live models."""
        return list(self._models)

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

    # -- of amp ----------------------------------------------------------------------------------

    def _end_of_pass(self, session: Session, end: PassEnd) -> None:
        own = [each for each in self.optimizers if binding_of(each) in end.bindings]
        if not own or self._listener is None:
            return
        params = (param for optimizer in own for param in params_of(optimizer))
        measured = None if end.failed else self._listener.measure(end.loss_id, params)
        scaler = session.scalers[end.loss_id]
        state = scaler.loss_scale, scaler.found_inf
        self._listener.end_of_pass(
            LoopPass(end.loss_id, end.updates, measured, *state, failed=end.failed)
        )

    # -- of plain torch --------------------------------------------------------------------------

    @untraced
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._listener is None:
            return
        if binding_of(optimizer) is not None:
            self._listener = None
            warnings.warn(
                "amp.debug stops watching an optimizer that amp.initialize has since prepared: it "
                "does not know its loss scale. Call History and arm after amp.initialize.",
                stacklevel=4,
            )
            return
        index = self._index(optimizer)
        measured = self._listener.measure(index, params_of(optimizer))
        device = torch.device("cpu") if measured is None else measured.device
        with suspend_modes():
            one, zero = torch.ones((), device=device), torch.zeros((), device=device)
        self._in_hook = True
        try:
            self._listener.end_of_pass(LoopPass(index, (), measured, one, zero))
        finally:
            self._in_hook = False

    @untraced
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Measures gradients before the step; those of a fused optimizer are still scaled."""
        index, scaler = self._index(optimizer), self._scaler()
        # Not of a step beside the scaler.
        if scaler is None or self._listener is None or not grad_scaler.skips(scaler, [optimizer]):
            return
        measured = self._listener.measure(index, params_of(optimizer))
        scale = grad_scaler.current_scale(scaler)
        if (
            measured is not None
            and not grad_scaler.holds_unscaled(scaler, optimizer)
            and scale is not None
        ):
            with suspend_modes():
                measured = measured / moved(scale, measured.device)
        self._measured[index] = measured

    def _before_update(self) -> grad_scaler.Steps:
        """Measures the gradients, unscaled by now, of optimizers whose step was skipped."""
        steps = grad_scaler.skips(self._scaler(), self.optimizers)
        for optimizer, _ in steps:
            index = self._index(optimizer)
            if index not in self._measured and self._listener is not None:
                self._measured[index] = self._listener.measure(index, params_of(optimizer))
        return steps

    def _updated(self, steps: grad_scaler.Steps, scale: Tensor) -> None:
        measured, self._measured = self._measured, {}
        for optimizer, found_inf in steps:
            index = self._index(optimizer)
            with suspend_modes():
                self._readback.send(index, torch.stack([scale, found_inf]))
            updates = [self._update(i, *values) for i, values in self._readback.poll()]
            if self._listener is not None:
                self._listener.end_of_pass(
                    LoopPass(index, updates, measured.get(index), scale, found_inf)
                )

    def _update(self, index: int, loss_scale: float, found_inf: float) -> ScaleUpdate:
        overflow = found_inf != 0.0
        in_row = self._skipped_in_row.get(index, 0) + 1 if overflow else 0
        self._skipped_in_row[index] = in_row
        return ScaleUpdate(index, loss_scale, overflow, 1, in_row)

    def _index(self, optimizer: Optimizer) -> int:
        return next(i for i, own in enumerate(self._optimizers) if own() is optimizer)


_BY_SCALE = "To skip such steps, pass loss_scale='dynamic' to amp.initialize."
_BY_CLIPPING = (
    "To skip such steps, call optimizer.step() only if the norm that clip_grad_norm_ returns is "
    "finite."
)


def loop_of(
    caller: str,
    optimizers: Sequence[Any],
    *,
    scaler: Any = None,
    models: nn.Module | Sequence[nn.Module] | None = None,
) -> Loop:
    """Returns the loop that steps ``optimizers``.

    Args:
        caller: Name of the public function, for error messages.
        optimizers: Optimizers or wrappers of them, all prepared by one ``amp.initialize`` call or
            all plain.
        scaler: The ``GradScaler`` of a plain loop; None without one.
        models: Models that provide names; by default those of the session.

    Raises:
        TypeError: If ``scaler`` is not a ``GradScaler``, or a model is not a module.
        ValueError: If the optimizers belong to several loops, or have a session and a ``scaler``.
    """
    check_scaler(caller, scaler)
    models = None if models is None else checked_models(caller, models)
    own = [inner(optimizer) for optimizer in optimizers]
    bindings = [binding for o in own if (binding := binding_of(o)) is not None]
    if not bindings:
        return Loop(own, models or (), scaler=scaler)
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
    return Loop(own, session.models if models is None else models, session=session)


# -- History ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One backward pass; in a plain loop, one step of an optimizer.

    Attributes:
        index: Position in the history, counted from 0.
        loss_id: Index of the loss whose scale was used; in a plain loop, of the optimizer.
        loss_scale: Scale after the pass (multiplier).
        overflow: Whether a gradient held inf or NaN, so that the step is skipped. Always False with
            a static scale, for which gradients are not checked.
        grad_norm: L2 norm of the unscaled gradients of the pass's own optimizers, including what
            earlier passes accumulated; None with ``grad_norms=False``. In a plain loop it is the
            norm at the step.
    """

    index: int
    loss_id: int
    loss_scale: float
    overflow: bool
    grad_norm: float | None


class History:
    """Records loss scale, overflow and gradient norm of every backward pass.

    Recording never blocks: each pass starts an asynchronous copy of a few numbers to the host.
    Reading ``passes``, or ``stop``, waits for the copies still under way. A gradient norm takes two
    kernels per pass; ``grad_norms=False`` saves them.

    The history does not record passes that leave the scale unchanged (``delay_unscale``,
    ``delay_overflow_check``, ``no_sync``) or that run inside a CUDA graph. For sharded parameters
    the norm covers all shards and requires communication: record on every rank or on none.

    In a loop without ``amp.initialize``, each step of a plain optimizer is a pass. With its
    ``GradScaler``, skipped steps are recorded too, and all norms are of unscaled gradients.

    The history keeps neither models nor optimizers alive, and ends when the last reference to it
    does.

    Args:
        optimizers: Optimizers prepared by one ``amp.initialize`` call, or plain ones. The history
            ignores passes of other optimizers.
        scaler: The ``torch.amp.GradScaler`` of a plain loop.
        model: The model or models of a plain loop, as the other tools take them.
        grad_norms: Whether to compute gradient norms.
        limit: Number of most recent passes to keep (about 200 bytes each); None keeps all.

    Raises:
        ValueError: If no optimizer is given, or if the optimizers come from different
            ``initialize`` calls, or if amp has prepared them and a ``scaler`` is given; if
            ``limit`` is neither None nor an integer of at least 1.
        TypeError: If ``scaler`` is not a ``GradScaler``.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        >>> with amp.debug.History(optimizer) as history:
        ...     loss = model(torch.ones(1, 2)).sum()
        ...     with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        >>> [(p.loss_scale, p.overflow, round(p.grad_norm, 3)) for p in history.passes]
        [(1.0, False, 1.732)]
    """

    def __init__(
        self,
        *optimizers: Any,
        scaler: Any = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        grad_norms: bool = True,
        limit: int | None = None,
    ) -> None:
        if limit is not None:
            integer("limit", limit, least=1, others=", or None")
        if not optimizers:
            raise ValueError(
                "amp.debug.History got no optimizer. Pass one or more: History(optimizer)."
            )
        self._loop = loop_of("History", optimizers, scaler=scaler, models=model)
        self._grad_norms = grad_norms
        self._readback: Readback[int] = Readback()
        self._passes: deque[Pass] = deque(maxlen=limit)
        self._seen = 0
        self._loop.listen(weakref.proxy(self))
        weakref.finalize(self, self._loop.stop).atexit = False

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops recording and keeps the recorded passes; idempotent. Waits for the device."""
        self._loop.stop()
        self._read(wait=True)

    @property
    def passes(self) -> list[Pass]:
        """The recorded passes, oldest first. Waits for the device."""
        self._read(wait=True)
        return list(self._passes)

    @property
    def skipped(self) -> int:
        """How many of ``passes`` overflowed."""
        return sum(item.overflow for item in self.passes)

    def __str__(self) -> str:
        """Returns a few lines for each loss, however many passes there are."""
        passes = self.passes
        if not passes:
            return "No backward pass recorded yet."
        losses, lines = _by_loss(passes), []
        for loss_id, own in losses.items():
            name = f"Loss {loss_id}: " if len(losses) > 1 else ""
            skipped = sum(item.overflow for item in own)
            share = f" ({percent(skipped / len(own))})" if skipped else ""
            count = counted(len(own), "backward pass", "es")
            span = f"({own[0].index} to {own[-1].index})"
            lines.append(f"{name}{count} {span}, {skipped} skipped{share}")
            lines += (f"  {line}" for line in _details(own))
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns ``passes`` as a JSON array of objects.

        A norm of inf or NaN becomes a string (``"inf"``, ``"nan"``), as JSON has no such numbers.
        """

        def plain(value: Any) -> Any:
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        passes = [asdict(item).items() for item in self.passes]
        return json.dumps([{n: plain(v) for n, v in items} for items in passes], indent=1)

    def to_tensorboard(self, writer: Any, prefix: str = "amp") -> None:
        """Writes every pass to a ``torch.utils.tensorboard.SummaryWriter``.

        Args:
            writer: Any object with ``add_scalar(tag, value, step)``; the step is the pass's index.
            prefix: Prefix of the tags ``loss_scale/0``, ``overflow/0`` and ``grad_norm/0``.
        """
        for item in self.passes:
            writer.add_scalar(f"{prefix}/loss_scale/{item.loss_id}", item.loss_scale, item.index)
            writer.add_scalar(f"{prefix}/overflow/{item.loss_id}", int(item.overflow), item.index)
            if item.grad_norm is not None:
                writer.add_scalar(f"{prefix}/grad_norm/{item.loss_id}", item.grad_norm, item.index)

    def plot(self) -> Figure:
        """Returns a matplotlib figure of loss scales, overflows and gradient norms.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "amp.debug.History.plot needs matplotlib: pip install 'apex-amp[plot]'. "
                "history.to_json() has the same data."
            ) from error
        passes = self.passes
        labels = ["loss scale"]
        labels += ["gradient norm"] * any(item.grad_norm is not None for item in passes)
        result = Figure(figsize=(9, 0.5 + 2.5 * len(labels)), layout="constrained")
        panels: Any = result.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, label in zip(panels, labels, strict=True):
            panel.set_yscale("log", base=2 if label == "loss scale" else 10)
            panel.set_ylabel(label)
        for loss_id, own in _by_loss(passes).items():
            points = [(item.index, item.loss_scale) for item in own]
            panels[0].step(*zip(*points, strict=True), where="post", label=f"loss {loss_id}")
            known = [(p.index, p.grad_norm) for p in own if math.isfinite(p.grad_norm or math.nan)]
            if known:
                panels[-1].plot(*zip(*known, strict=True), label=f"loss {loss_id}")
        over = [(item.index, item.loss_scale) for item in passes if item.overflow]
        if over:
            label = f"overflow, step skipped ({len(over)})"
            panels[0].plot(*zip(*over, strict=True), "v", color="tab:red", label=label)
        panels[0].legend()
        panels[-1].set_xlabel("backward pass")
        return result

    def measure(self, loss_id: int, params: Iterable[Tensor]) -> Tensor | None:
        """Returns the norm of a pass's gradients; called by the loop."""
        return _norm(params) if self._grad_norms else None

    @torch.no_grad()
    @suspend_modes()
    def end_of_pass(self, end: LoopPass) -> None:
        """Records a pass; called by the loop."""
        if end.failed:
            return
        numbers = [end.loss_scale, end.found_inf]
        if end.measured is not None:
            numbers.append(end.measured.to(end.loss_scale.device, torch.float32))
        self._readback.send(end.loss_id, torch.stack(numbers))
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        for loss_id, (scale, found_inf, *norm) in self._readback.poll(wait=wait):
            found = Pass(self._seen, loss_id, scale, found_inf != 0.0, norm[0] if norm else None)
            self._passes.append(found)
            self._seen += 1


def _by_loss(passes: Sequence[Pass]) -> dict[int, list[Pass]]:
    losses = sorted({item.loss_id for item in passes})
    return {loss_id: [item for item in passes if item.loss_id == loss_id] for loss_id in losses}


def _details(passes: Sequence[Pass]) -> Iterator[str]:
    scales = [item.loss_scale for item in passes]
    span = f", from {min(scales):g} to {max(scales):g}" if min(scales) < max(scales) else ""
    yield f"loss scale     {scales[-1]:g} now{span}"
    skips = [item.index for item in passes if item.overflow]
    if skips:
        runs = itertools.groupby(item.overflow for item in passes)
        rows = (len(list(run)) for skipped, run in runs if skipped)
        yield f"skips          the last in pass {skips[-1]}, at most {max(rows)} in a row"
    known = [(item.grad_norm, item.index) for item in passes if item.grad_norm is not None]
    norms = [(norm, index) for norm, index in known if math.isfinite(norm)]
    bad = len(known) - len(norms)
    if norms:
        values, (largest, index) = [norm for norm, _ in norms], max(norms)
        yield (
            f"gradient norm  {values[-1]:.3g} last, median {statistics.median(values):.3g}, "
            f"largest {largest:.3g} in pass {index}" + (f", {bad} not finite" if bad else "")
        )
    elif bad:
        yield f"gradient norm  inf or NaN in all {bad} passes"


@torch.no_grad()
def _norm(params: Iterable[Tensor]) -> Tensor:
    read = [grad for param in params if (grad := param.grad) is not None]
    with suspend_modes():  # a trace is of the script's operators; reading a master's may be one
        grads = [finite.summed_values(grad) for grad in read]
        if dtensor.any_dtensor(grads):
            norm = torch.nn.utils.get_total_norm(grads)
            return norm.full_tensor() if dtensor.is_dtensor(norm) else norm
        device = grads[0].device if grads else torch.device("cpu")
        # In fp32: of 16-bit gradients, torch returns a 16-bit norm.
        return norms.total(norms.stacked(norms.l2_norms(grads), device))


# -- arm -------------------------------------------------------------------------------------------


def arm(
    optimizer: Any,
    after_skips: int = 3,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    scaler: Any = None,
) -> AutoTrace:
    """Traces one step automatically once gradients keep overflowing, and reports the cause.

    Where a loss scale is dynamic (O1, O2), the handle waits for ``after_skips`` consecutive skips
    of one loss. Then :func:`apex.debug.trace_overflow` traces everything up to the end of that
    loss's next backward pass. If it finds a fault, rank 0 logs the report as a warning to the
    logger ``apex``, other ranks a line if they computed inf or NaN themselves, and the handle
    disarms itself. It stays armed, silently, if the step is clean or if only the scaled gradients
    overflow: a dynamic scale finds its value by such skips. Steps that are not traced cost no extra
    host sync and no extra kernel.

    Where all scales are static (O0, O3, O4, O5), nothing is skipped, and one step on inf or NaN
    destroys the weights. So the handle looks for non-finite gradients on the device after each
    pass (a few kernels, no host sync), and the first that arrives starts the trace. The report
    names these gradients and the pass, and the operator if the weights are still finite.

    In a loop without ``amp.initialize``, pass the model and, where one is used, the ``GradScaler``:
    its scale is the dynamic one. Each step of the optimizer counts as a pass.

    The trace ends early on an exception from the model or the ``scale_loss`` block, and when the
    model is called in eval mode or without gradients.

    Args:
        optimizer: An optimizer prepared by ``amp.initialize``, or a plain one.
        after_skips: Consecutive skipped steps before a trace; at least 1.
        model: The model or models that provide module names; by default those passed to
            ``amp.initialize``. Required with a plain optimizer.
        scaler: The ``torch.amp.GradScaler`` of a plain loop. Without one, the handle treats the
            loop as it does static scales.

    Returns:
        A handle with ``disarm()`` and ``trace``; as a context manager, it disarms on exit.

    Raises:
        RuntimeError: If amp has not prepared the optimizer and ``model`` is missing.
        TypeError: If ``scaler`` is not a ``GradScaler``.
        ValueError: If ``after_skips`` is less than 1, or if amp has prepared the optimizer and a
            ``scaler`` is given.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> handle = amp.debug.arm(optimizer)
        >>> handle.trace is None
        True
        >>> handle.disarm()
    """
    integer("after_skips", after_skips, least=1)
    if model is None and binding_of(inner(optimizer)) is None:
        raise RuntimeError(
            "amp.debug.arm got an optimizer that amp has not prepared. Pass it to "
            "amp.initialize(model, optimizer) and use the one returned. In a loop without "
            "amp.initialize, pass the model too: arm(optimizer, model=model)."
        )
    return AutoTrace(loop_of("arm", [optimizer], scaler=scaler, models=model), scaler, after_skips)


class AutoTrace:
    """The handle that :func:`arm` returns.

    Attributes:
        trace: The trace of the last traced step; None before the first.
    """

    def __init__(self, loop: Loop, scaler: Any, after_skips: int) -> None:
        self.trace: OverflowTrace | None = None
        self._loop = loop
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._after_skips = after_skips
        self._readback: Readback[tuple[int, int, list[int]]] = Readback()  # see `measure`
        self._passes = 0
        self._nonfinite = ""  # the first sentence of a report on gradients
        self._skips_at_trace: dict[int, int] = {}
        self._traced_loss: int | None = None
        self._thread = 0
        self._handles: list[RemovableHandle] = []
        self._error: BaseException | None = None
        loop.listen(self)

    def __enter__(self) -> AutoTrace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disarm()

    @property
    def watching(self) -> bool:
        """Whether a step is being traced."""
        return self._traced_loss is not None

    def disarm(self) -> None:
        """Stops listening, and ends a trace started by this thread; idempotent."""
        self._loop.stop()
        self._stop()
        self._remove_hooks()

    @torch.no_grad()
    def measure(self, loss_id: int, params: Iterable[Tensor]) -> None:
        """Sends the gradients' largest values to the host; called by the loop.

        They belong to the pass's number, its loss and the ids of its parameters.
        """
        if self._loop.dynamic or self.watching:
            return
        self._passes += 1
        own = {id(p): grad for p in params if (grad := p.grad) is not None}
        if own:
            with suspend_modes():
                grads = [finite.summed_values(dtensor.local(grad)) for grad in own.values()]
                largest = norms.stacked(norms.max_norms(grads), grads[0].device)
                self._readback.send((self._passes, loss_id, list(own)), largest)

    def end_of_pass(self, end: LoopPass) -> None:
        """Starts a trace if one is due, or ends one; called by the loop."""
        due = self._due(end)
        if self.watching and threading.get_ident() == self._thread:
            if end.loss_id == self._traced_loss:
                self._stop()
                self._remove_hooks()
                self._report()
            return
        self._remove_hooks()
        if due is not None:
            self._skips_at_trace[due.loss_id] = due.skipped_in_row
            self._start(due.loss_id)
        elif not end.failed:
            self._start_if_nonfinite()

    def _start_if_nonfinite(self) -> None:
        for (number, loss_id, params), largest in self._readback.poll():
            values = zip(params, largest, strict=True)
            bad = {param for param, value in values if not math.isfinite(value)}
            if bad:
                names = [name for key, name in self._loop.names().items() if key in bad]
                self._nonfinite = (
                    f"Gradients are not finite since {self._loop.unit} {number} after "
                    f"amp.debug.arm: {listed(names, 3)} ({len(bad)} of {len(params)} gradients)."
                )
                self._start(loss_id)
                return

    def _due(self, end: LoopPass) -> ScaleUpdate | None:
        """Returns the skip that calls for a trace, if any."""
        for update in end.updates:
            if not update.skipped_in_row:
                self._skips_at_trace.pop(update.loss_id, None)
            traced = self._skips_at_trace.get(update.loss_id, 0)
            if update.skipped_in_row >= traced + self._after_skips:
                return update
        return None

    def _start(self, loss_id: int) -> None:
        models = self._loop.models
        trace = OverflowTrace(*models, scaler=None if self._scaler is None else self._scaler())
        with suspend_modes():
            trace.__enter__()
        self.trace, self._traced_loss, self._thread = trace, loss_id, threading.get_ident()
        called = _Hooks(self, models)
        for model in models:  # a scripted module's own methods refuse hooks
            register = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
            self._handles.append(register[0](model, called.before))
            self._handles.append(register[1](model, called.after, always_call=True))

    def _stop(self) -> None:
        own_thread = threading.get_ident() == self._thread  # modes are per thread
        self._error = None
        if self.watching and self.trace is not None and own_thread:
            self._traced_loss = None
            with suspend_modes(self.trace.mode):
                self.trace.__exit__(None, None, None)

    def _remove_hooks(self) -> None:
        while self._handles and not self.watching:
            self._handles.pop().remove()

    def _report(self) -> None:
        first = None if self.trace is None else self.trace.first
        message = None if first is None else self._message(first)
        if first is None or message is None:
            return
        _log.warning(message)  # on rank 0 only
        rank = ranks.rank()
        if rank and first.cause not in (*_EARLIER, "another rank"):  # rank 0 may not see it
            _log.warning(
                f"Rank {rank}: {first.what}; cause: {first.cause}. "
                "The handle's `trace` on this rank has the report.",
                extra={"any_rank": True},
            )
        self.disarm()

    def _message(self, first: Finding) -> str | None:
        """Returns the report, or None if the traced step shows no fault."""
        if first.cause == "loss scale":
            return None  # a dynamic scale that is finding its value
        if not self._nonfinite:
            if first.cause == "gradients":
                return None  # clean, apart from gradients left by the skipped step
            return f"{self._after_skips} or more consecutive steps were skipped. {self.trace}"
        if first.cause not in _EARLIER:
            return f"{self._nonfinite} The trace of the next pass: {self.trace}"
        weights = map(dtensor.local, self._loop.params())
        if all(bool(torch.isfinite(weight).all()) for weight in weights):  # sync: a diagnosis
            return None  # the script did not step on these gradients
        return (
            f"{self._nonfinite} The weights are no longer finite: an optimizer has stepped on "
            "them. To find the operator, go back to an earlier checkpoint and run this iteration "
            f"inside amp.debug.trace_overflow(model). {self._loop.remedy}"
        )

    # Called by hooks of the models while a step is traced. torch is iterating over them, so they
    # stop the trace and are removed later.

    def before_forward(self, model: nn.Module) -> None:
        """Ends the trace before an evaluation."""
        self._error = sys.exc_info()[1]
        if not model.training or not torch.is_grad_enabled():
            self._stop()

    def after_forward(self) -> None:
        """Ends the trace after an exception."""
        if sys.exc_info()[1] is not self._error:
            self._stop()


class _Hooks:
    """The hooks of traced models, which do nothing in a copy of a model and in its file.

    Scripts copy (for an average of the weights) and save models in a traced iteration, too.
    """

    def __init__(self, trace: AutoTrace | None = None, models: Iterable[nn.Module] = ()) -> None:
        self._trace, self._models = trace, weakref.WeakSet(models)

    def __reduce__(self) -> Any:
        return _Hooks, ()

    def before(self, model: nn.Module, _: Any) -> None:
        """Called before the forward."""
        if self._trace is not None and model in self._models:
            self._trace.before_forward(model)

    def after(self, model: nn.Module, *_: Any) -> None:
        """Called after the forward, after an exception, too."""
        if self._trace is not None and model in self._models:
            self._trace.after_forward()


_EARLIER = ("gradients", "weights", "optimizer state")
"""Causes that a step on non-finite gradients leaves behind."""
