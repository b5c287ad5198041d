"""Traces one step automatically after several consecutive skips."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from apex._engine.events import PassEnd
from apex._engine.model import module_behind
from apex._engine.session import Session
from apex._torch import ranks
from apex.debug.modes import suspend_modes
from apex.debug.overflow import OverflowTrace
from apex.debug.skips import require_session


def arm(
    optimizer: Any, after_skips: int = 3, *, model: nn.Module | Sequence[nn.Module] | None = None
) -> AutoTrace:
    """Traces the overflow of one step automatically after several consecutive skipped steps.

    After ``after_skips`` consecutive skips for one loss, :func:`apex.debug.trace_overflow` traces
    everything up to the end of that loss's next backward pass. If it finds a fault, rank 0 logs the
    report as a warning to the logger ``apex``, and the handle disarms itself. If the step is clean,
    the handle waits for the next run of skips. Steps that are not traced cost no extra kernel and
    no extra host sync.

    The trace ends early on an exception from the model or the ``scale_loss`` block, and when the
    model is called in eval mode or without gradients.

    Args:
        optimizer: An optimizer prepared by ``amp.initialize``.
        after_skips: Consecutive skipped steps before a trace; at least 1.
        model: The model or models that provide module names; by default those passed to
            ``amp.initialize``.

    Returns:
        A handle with ``disarm()`` and ``trace``; as a context manager, it disarms on exit.

    Raises:
        RuntimeError: If amp has not prepared the optimizer.
        ValueError: If all loss scales are static, so that no step is ever skipped, or if
            ``after_skips`` is less than 1.

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
    if after_skips < 1:
        raise ValueError(f"amp.debug.arm got after_skips={after_skips}; it must be at least 1.")
    session, _ = require_session(optimizer, "arm")
    if not any(scaler.dynamic for scaler in session.scalers):
        raise ValueError(
            "amp.debug.arm got an optimizer whose loss scales are all static, so no step is ever "
            "skipped and no trace would start. Pass loss_scale='dynamic' to amp.initialize, or "
            "use amp.debug.trace_overflow(model) around a step."
        )
    models = session.models if model is None else [model] if isinstance(model, nn.Module) else model
    return AutoTrace(session, list(models), after_skips)


class AutoTrace:
    """The handle that :func:`arm` returns.

    Attributes:
        trace: The trace of the last traced step; None before the first.
    """

    def __init__(self, session: Session, models: list[nn.Module], after_skips: int) -> None:
        """Starts listening to the session's backward passes."""
        self.trace: OverflowTrace | None = None
        self._session = weakref.ref(session)
        self._models = weakref.WeakSet(map(module_behind, models))
        self._after_skips = after_skips
        self._traced_loss: int | None = None
        self._thread = 0
        self._handles: list[Any] = []
        self._error: BaseException | None = None
        session.add_listener(self._end_of_pass)

    def __enter__(self) -> AutoTrace:
        """Returns the handle."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Disarms."""
        self.disarm()

    @property
    def watching(self) -> bool:
        """Whether a step is being traced."""
        return self._traced_loss is not None

    def disarm(self) -> None:
        """Stops listening, and ends a trace started by this thread; idempotent."""
        session = self._session()
        if session is not None:
            session.remove_listener(self._end_of_pass)
        self._stop()
        self._remove_hooks()

    def _end_of_pass(self, _: Session, end: PassEnd) -> None:
        if self.watching and threading.get_ident() == self._thread:
            if end.loss_id == self._traced_loss:
                self._stop()
                self._remove_hooks()
                self._report()
            return
        self._remove_hooks()
        for update in end.updates:
            if update.skipped_in_row >= self._after_skips:
                self._start(update.loss_id)
                return

    def _start(self, loss_id: int) -> None:
        models = list(self._models)
        trace = OverflowTrace(*models)
        with suspend_modes():
            trace.__enter__()
        self.trace, self._traced_loss, self._thread = trace, loss_id, threading.get_ident()
        for model in models:
            self._handles += [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward, always_call=True),
            ]

    def _stop(self) -> None:
        own_thread = threading.get_ident() == self._thread  # modes are per thread
        self._error = None
        if self.watching and self.trace is not None and own_thread:
            self._traced_loss = None
            with suspend_modes(self.trace.mode):
                self.trace.stop_mode()

    def _remove_hooks(self) -> None:
        if self.trace is not None and not self.watching:
            self.trace.__exit__(None, None, None)
            while self._handles:
                self._handles.pop().remove()

    def _report(self) -> None:
        trace = self.trace
        if trace is None or trace.first is None or trace.first.cause == "gradients":
            return  # clean, apart from gradients left by the skipped step
        if ranks.rank() == 0:
            logging.getLogger("apex").warning(
                "%d or more consecutive steps were skipped. %s", self._after_skips, trace
            )
        self.disarm()

    # Hooks of the models while a step is traced. torch is iterating over them when they run, so
    # they stop the trace and are removed later.

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        self._error = sys.exc_info()[1]
        if not model.training or not torch.is_grad_enabled():
            self._stop()

    def _after_forward(self, *_: Any) -> None:
        if sys.exc_info()[1] is not self._error:
            self._stop()
