"""Watches the backward passes of a session: ``History`` records them, ``arm`` traces a bad one."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from apex._core.arguments import integer
from apex._core.foreach import norms
from apex._engine.backward import BackwardPass
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._engine.optimizer.subclass import prepared_state
from apex._engine.scaler import Readback
from apex._engine.session import Session
from apex._torch import dtensor
from apex._torch.dispatch_modes import suspend_modes
from apex.debug.common import counted, inner, to_json
from apex.debug.overflow import OverflowTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger("apex")


def _prepared_state(caller: str, optimizer: Any) -> PreparedOptimizer:
    """Returns amp's state of an optimizer; raises an error for one that is not prepared."""
    prepared = prepared_state(inner(optimizer))
    if prepared is None:
        raise ValueError(
            f"amp.debug.{caller} got an optimizer that amp has not prepared. Copies are plain. "
            "Pass it to amp.initialize(model, optimizer) and use the one "
            "returned. A loop without amp.initialize is traced by `apex trace train.py`."
        )
    return prepared


def _listen(prepared: PreparedOptimizer, tool: Any) -> Callable[[], None]:
    """Calls ``tool._end_of_pass`` after each pass of the optimizer; returns a function to stop.

    The function does not keep the optimizer alive, and may be called again.
    """

    def listener(ended: BackwardPass, prepared: PreparedOptimizer) -> None:
        tool._end_of_pass(ended, prepared)

    prepared.listeners.append(listener)
    return weakref.finalize(prepared, prepared.listeners.remove, listener)


# -- History ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        index: Position in the history, counted from 0.
        loss_id: Index of the loss whose scale was used.
        loss_scale: Scale after the pass (multiplier).
        overflow: Whether a gradient held inf or NaN, so that the step is skipped. Always False with
            a static scale, for which gradients are not checked.
        grad_norm: L2 norm of the optimizer's unscaled gradients, including what earlier passes
            accumulated.
    """

    index: int
    loss_id: int
    loss_scale: float
    overflow: bool
    grad_norm: float


class History:
    """Records loss scale, overflow and gradient norm of every backward pass.

    Recording never blocks: each pass starts an asynchronous copy of a few numbers to the host.
    Reading ``passes`` waits for the copies still under way. A gradient norm takes two kernels per
    pass.

    The history does not record passes that leave the scale unchanged (``delay_unscale``,
    ``delay_overflow_check``, ``no_sync``) or that run inside a CUDA graph. For sharded parameters
    the norm covers all shards and requires communication: record on every rank or on none.

    The history keeps neither models nor optimizers alive. Recording ends when the history is no
    longer referenced.

    Args:
        optimizer: An optimizer prepared by ``amp.initialize``. The history ignores the passes of
            other optimizers.
        limit: Number of most recent passes to keep (about 200 bytes each); None keeps all.

    Raises:
        ValueError: If amp has not prepared the optimizer, or ``limit`` is neither None nor an
            integer of at least 1.

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

    def __init__(self, optimizer: Any, *, limit: int | None = None) -> None:
        if limit is not None:
            integer("limit", limit, least=1)
        prepared = _prepared_state("History", optimizer)
        # Numbers on their way to the host, by loss.
        self._readback = Readback[int]()
        self._passes = deque[Pass](maxlen=limit)
        # Number of passes recorded, including those beyond the limit.
        self._seen = 0
        stop_listening = _listen(prepared, weakref.proxy(self))
        self._stop = weakref.finalize(self, stop_listening)

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops recording and keeps the recorded passes; idempotent."""
        self._stop()

    @property
    def passes(self) -> list[Pass]:
        """The recorded passes, oldest first. Waits for the device."""
        self._read(wait=True)
        return list(self._passes)

    @property
    def skipped(self) -> int:
        """Number of ``passes`` that overflowed."""
        return sum(item.overflow for item in self.passes)

    def __str__(self) -> str:
        """Returns one line per loss."""
        lines = []
        for loss_id, passes in _by_loss(self.passes):
            count = counted(len(passes), "backward pass", "es")
            skipped = sum(item.overflow for item in passes)
            scales = [item.loss_scale for item in passes]
            grad_norms = [item.grad_norm for item in passes]
            finite = filter(math.isfinite, grad_norms)
            largest = max(finite, default=math.nan)
            lines.append(
                f"Loss {loss_id}: {count}, {skipped} skipped; "
                f"scale {scales[-1]:g}, from {min(scales):g} to {max(scales):g}; "
                f"gradient norm {grad_norms[-1]:.3g}, at most {largest:.3g}"
            )
        return "\n".join(lines) or "No backward pass recorded yet."

    def to_json(self) -> str:
        """Returns ``passes`` as a JSON array of objects; a norm that is inf or NaN is null."""
        return to_json(self.passes)

    def to_tensorboard(self, writer: Any, prefix: str = "amp") -> None:
        """Writes every pass to a ``torch.utils.tensorboard.SummaryWriter``.

        Args:
            writer: Any object with ``add_scalar(tag, value, step)``; the step is the pass's index.
            prefix: Prefix of the tags ``loss_scale/0``, ``overflow/0`` and ``grad_norm/0``.
        """
        for item in self.passes:
            for name in ("loss_scale", "overflow", "grad_norm"):
                value = float(getattr(item, name))
                writer.add_scalar(f"{prefix}/{name}/{item.loss_id}", value, item.index)

    def plot(self) -> Figure:
        """Returns a matplotlib figure of loss scales, overflows and gradient norms.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "amp.debug.History.plot needs matplotlib: pip install matplotlib. "
                "history.to_json() has the same data."
            ) from error
        figure = Figure(layout="constrained")
        upper, lower = cast(Any, figure.subplots(2, 1, sharex=True))
        for loss_id, passes in _by_loss(self.passes):
            name = f"loss {loss_id}"
            indices = [item.index for item in passes]
            loss_scales = [item.loss_scale for item in passes]
            grad_norms = [item.grad_norm for item in passes]
            upper.step(indices, loss_scales, where="post", label=name)
            lower.plot(indices, grad_norms)
            # A marker for each skipped step.
            skipped = [item for item in passes if item.overflow]
            indices = [item.index for item in skipped]
            loss_scales = [item.loss_scale for item in skipped]
            label = f"{name}: overflow, step skipped ({len(skipped)})"
            upper.plot(indices, loss_scales, "v", label=label)
        upper.set(ylabel="loss scale")
        upper.set_yscale("log", base=2)
        upper.legend()
        lower.set(ylabel="gradient norm", yscale="log", xlabel="backward pass")
        return figure

    @torch.no_grad()
    @suspend_modes()
    def _end_of_pass(self, ended: BackwardPass, prepared: PreparedOptimizer) -> None:
        """Starts the copy of a pass's numbers to the host."""
        if ended.failed:
            return
        scaler = ended.scaler
        scale = scaler.loss_scale
        norm = _norm(prepared.trained_params()).to(scale.device, torch.float32)
        numbers = torch.stack([scale, scaler.found_inf, norm])
        self._readback.send(scaler.loss_id, numbers)
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        """Records the passes whose numbers have arrived on the host, or waits for all."""
        for loss_id, numbers in self._readback.poll(wait=wait):
            scale, found_inf, norm = numbers
            overflow = found_inf != 0.0
            self._passes.append(Pass(self._seen, loss_id, scale, overflow, norm))
            self._seen += 1


def _by_loss(passes: list[Pass]) -> Iterator[tuple[int, list[Pass]]]:
    """Yields each loss with its passes, in order of the losses."""
    for loss_id in sorted({item.loss_id for item in passes}):
        yield loss_id, [item for item in passes if item.loss_id == loss_id]


def _norm(params: Iterable[Tensor]) -> Tensor:
    """Returns the L2 norm of the parameters' gradients, over all shards."""
    grads = [dtensor.summed_values(param.grad) for param in params if param.grad is not None]
    norm = norms.global_norm(grads)  # in fp32: torch's norm has the gradients' dtype
    if dtensor.is_dtensor(norm):
        norm = norm.full_tensor()
    return norm


# -- arm -------------------------------------------------------------------------------------------


def arm(optimizer: Any, after_skips: int = 3) -> AutoTrace:
    """Traces one step automatically once steps keep being skipped, and reports the cause.

    The handle waits for ``after_skips`` consecutive skips of one loss, whose scale is dynamic (O1,
    O2). Then :func:`apex.debug.trace_overflow` traces every operator up to the end of that loss's
    next backward pass. If it finds a fault, the handle logs the report as a warning to the logger
    ``apex`` and disarms itself. If the step is clean, or only the scaled gradients overflow, the
    handle stays armed and logs nothing: such skips make a dynamic scale back off. Steps that are
    not traced cost no extra host sync and no extra kernel.

    With several processes, each process traces its own operators, and logs its own faults.

    Args:
        optimizer: An optimizer prepared by ``amp.initialize``.
        after_skips: Consecutive skipped steps before a trace; at least 1.

    Returns:
        A handle with ``disarm()`` and ``trace``.

    Raises:
        ValueError: If ``after_skips`` is less than 1, if amp has not prepared the optimizer, or if
            no loss scale is dynamic, so that no step is skipped.

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
    prepared = _prepared_state("arm", optimizer)
    session = prepared.session
    if not session.can_skip:
        raise ValueError(
            "amp.debug.arm waits for skipped steps, and with the static loss scale of this session "
            f"({session.policy.opt_level}) no step is skipped. Run `apex trace train.py`, or pass "
            "loss_scale='dynamic' to amp.initialize."
        )
    return AutoTrace(prepared, after_skips)


class AutoTrace:
    """The handle that :func:`arm` returns.

    Attributes:
        trace: The trace of the last traced step; None before the first.
    """

    def __init__(self, prepared: PreparedOptimizer, after_skips: int) -> None:
        self.trace: OverflowTrace | None = None
        self._after_skips = after_skips
        # The loss and the thread of the running trace; None without one.
        self._traced: tuple[int, int] | None = None
        self._stop_listening = _listen(prepared, self)

    def disarm(self) -> None:
        """Stops listening, and ends a trace that this thread started; idempotent."""
        self._stop_listening()
        self._stop()

    def _end_of_pass(self, ended: BackwardPass, _: PreparedOptimizer) -> None:
        traced = ended.scaler.loss_id, threading.get_ident()
        if self._traced is None:
            for update in ended.updates:
                skips = update.skipped_in_row
                if skips and skips % self._after_skips == 0:
                    self._start(ended.session)
                    self._traced = traced
                    return
        elif self._traced == traced:
            self._stop()
            self._report()

    def _start(self, session: Session) -> None:
        self.trace = OverflowTrace(*session.models)
        with suspend_modes():
            self.trace.__enter__()

    def _stop(self) -> None:
        if self.trace is None or self._traced is None:  # no trace is running
            return
        _, thread = self._traced
        if thread == threading.get_ident():  # modes are per thread
            self._traced = None
            self.trace.__exit__(None, None, None)

    def _report(self) -> None:
        first = self.trace.first if self.trace is not None else None
        # A dynamic scale backs off, or the skipped step has left its gradients.
        if first is None or first.cause in ("loss scale", "gradients"):
            return
        text = f"{self._after_skips} or more consecutive steps were skipped. {self.trace}"
        _log.warning(text, extra={"any_rank": first.cause != "another rank"})
        self.disarm()
