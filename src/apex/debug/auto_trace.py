"""Traces one step automatically once gradients keep overflowing."""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import finite
from apex._core.arguments import integer
from apex._core.foreach import norms
from apex._engine.events import ScaleUpdate
from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.readback import Readback
from apex._torch import dtensor, ranks
from apex._torch.dispatch_modes import suspend_modes
from apex.debug.arguments import inner
from apex.debug.loops import Loop, LoopPass, loop_of
from apex.debug.module_tracker import UncopiedHook, hook_forward
from apex.debug.overflow import OverflowTrace
from apex.debug.place import Finding
from apex.debug.rendering.formatting import listed, percent
from apex.debug.update_watch import (
    EVERY,
    FROZEN,
    UNDERFLOW,
    Measured,
    ModuleUpdates,
    UpdateWatch,
    summary,
)

_log = logging.getLogger("apex")


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
    host sync, and no extra kernel but in one of 16 (see below).

    Where all scales are static (O0, O3, O4, O5), nothing is skipped, and one step on inf or NaN
    destroys the weights. So the handle looks for non-finite gradients on the device after each
    pass (a few kernels, no host sync), and the first that arrives starts the trace. The report
    names these gradients and the pass, and the operator if the weights are still finite.

    One step of 16 is sampled, as in :class:`apex.debug.History`. The handle warns once if most
    16-bit weights of a module do not move in 16 updates and no master holds the difference, and
    once if more than a tenth of a module's gradients are zero only because fp16 cannot hold them.
    It stays armed then.

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
    loop = loop_of("arm", [optimizer], scaler=scaler, models=model, only=False)
    return AutoTrace(loop, scaler, after_skips)


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
        self._handles: list[Any] = []
        self._error: BaseException | None = None
        self._last: Measured = {}
        self._said: set[str] = set()
        self._updates = UpdateWatch(loop, self._measured, every=EVERY, span=EVERY)
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
        self._updates.stop()
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
                    f"amp.debug.arm: {listed(names, _MAX_NAMED)} ({len(bad)} of {len(params)} "
                    "gradients)."
                )
                self._start(loss_id)
                return

    def _measured(self, measured: Measured) -> None:
        """Reports weights that do not move and gradients that underflow, each once."""
        # Underflow from two measurements: a first step is often unlike the next.
        again = {name: counts for name, counts in measured.items() if name in self._last}
        both = [{name: self._last[name] for name in again}, again]
        self._last |= measured
        found = {
            "weights": frozen_message(summary([measured], fp16=False), self._loop),
            "gradients": underflow_message(summary(both, fp16=self._loop.in_fp16), self._loop),
        }
        for kind, message in found.items():
            if message and kind not in self._said:
                self._said.add(kind)
                _log.warning(message)

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
        before, after = UncopiedHook(self._before_forward), UncopiedHook(self._after_forward)
        for model in models:
            self._handles += hook_forward(model, before, after)

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
            f"{self._nonfinite} The weights are no longer finite: without a dynamic loss "
            "scale no step is skipped. To find the operator, go back to an earlier checkpoint and "
            f"run this iteration inside amp.debug.trace_overflow(model). {self._loop.remedy}"
        )

    # Hooks of the models while a step is traced. torch is iterating over them when they run, so
    # they stop the trace and are removed later.

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        self._error = sys.exc_info()[1]
        if not model.training or not torch.is_grad_enabled():
            self._stop()

    def _after_forward(self, *_: Any) -> None:
        if sys.exc_info()[1] is not self._error:
            self._stop()


_EARLIER = ("gradients", "weights", "optimizer state")
"""Causes that a step on non-finite gradients leaves behind."""

_MAX_NAMED = 3
_LEAST = 8  # sampled elements, below which a share says little


def frozen_message(modules: Sequence[ModuleUpdates], loop: Loop) -> str:
    """Returns the report on modules of which more than ``FROZEN`` does not move; "" for none."""
    bad = [m for m in modules if m.weights >= _LEAST and m.frozen > FROZEN]
    if not bad:
        return ""
    return (
        f"Weights do not move: over {EVERY} updates, {_shares(bad, lambda m: m.frozen)} kept their "
        "value, of the 16-bit weights with a gradient. Each update is below half of the weight's "
        "rounding step, and no fp32 weight holds the difference. "
        f"{loop.keeps_fp32}, or raise the learning rate."
    )


def underflow_message(modules: Sequence[ModuleUpdates], loop: Loop) -> str:
    """Returns the report on modules whose gradients underflow in fp16; "" for none.

    Where all gradients are zero, and nothing tells whether fp16 made them, it says so.
    """
    watched = [m for m in modules if m.gradients]
    if watched and all(m.zeros == 1.0 and not m.underflow for m in watched):
        return (
            f"All sampled gradients are 0, again after {EVERY} updates: nothing is learned. If "
            "torch.autocast computes in fp16, they may be below its smallest number, 6e-08. "
            f"{loop.scales}."
        )
    bad = [m for m in modules if m.gradients >= _LEAST and m.underflow > UNDERFLOW]
    if not bad:
        return ""
    return (
        f"Gradients underflow: about {_shares(bad, lambda m: m.underflow)} are 0 only "
        "because they are below fp16's smallest number, 6e-08 after scaling. "
        f"{loop.scales}."
    )


def _shares(modules: list[ModuleUpdates], share: Callable[[ModuleUpdates], float]) -> str:
    worst = sorted(modules, key=share, reverse=True)
    named = [f"{percent(share(m))} in {m.module or 'the model'}" for m in worst]
    return listed(named, _MAX_NAMED, " modules")
