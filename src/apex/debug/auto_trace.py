"""Watch one step by itself, once several in a row were skipped."""

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
from apex._engine.session import Session
from apex._torch import ranks
from apex.debug.modes import set_aside
from apex.debug.overflow import OverflowTrace
from apex.debug.skips import prepared


def arm(
    optimizer: Any, after_skips: int = 3, *, model: nn.Module | Sequence[nn.Module] | None = None
) -> Armed:
    """Traces the overflow of one step by itself, after several skipped steps in a row.

    When ``after_skips`` steps in a row were skipped for a loss, everything from then to the end of
    that loss's next backward pass is watched as by :func:`apex.debug.trace_overflow`. If that
    finds a fault, the report goes to the logger ``apex`` (rank 0) as a warning, once, and the watch
    is over; if the step was clean, it waits for the next row of skips. Until then steps cost no
    kernel and no host sync more.

    The watched step ends early with an exception out of the model or the ``scale_loss`` block, and
    when the model is called in eval mode or without gradients.

    Args:
        optimizer: One that ``amp.initialize`` prepared.
        after_skips: Skipped steps in a row; at least 1.
        model: The model or models, for the names; those given to ``amp.initialize`` by default.

    Returns:
        A handle with ``disarm()`` and ``trace``; also a context manager that disarms at its end.

    Raises:
        RuntimeError: For an optimizer that is not prepared.
        ValueError: If its loss scales are static: no step is ever skipped. Or if ``after_skips`` is
            less than 1.

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
    session, _ = prepared(optimizer, "arm")
    if not any(scaler.dynamic for scaler in session.scalers):
        raise ValueError(
            "amp.debug.arm got an optimizer whose loss scales are all static: no step is ever "
            "skipped, so it would wait for ever. Pass loss_scale='dynamic' to amp.initialize, or "
            "put amp.debug.trace_overflow(model) around a step."
        )
    models = session.models if model is None else [model] if isinstance(model, nn.Module) else model
    return Armed(session, list(models), after_skips)


class Armed:
    """What :func:`arm` returns.

    Attributes:
        trace: The last watched step; None before it.
    """

    def __init__(self, session: Session, models: list[nn.Module], after_skips: int) -> None:
        """Begins to listen."""
        self.trace: OverflowTrace | None = None
        self._session = weakref.ref(session)
        self._models = weakref.WeakSet(models)
        self._after_skips = after_skips
        self._watched_loss: int | None = None
        self._thread = 0
        self._handles: list[Any] = []
        self._error: BaseException | None = None
        session.add_listener(self._end_of_pass)

    def __enter__(self) -> Armed:
        """Returns itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Disarms."""
        self.disarm()

    @property
    def watching(self) -> bool:
        """Whether a step is being watched now."""
        return self._watched_loss is not None

    def disarm(self) -> None:
        """Ends it, a watch that this thread has begun included; may be called again."""
        session = self._session()
        if session is not None:
            session.remove_listener(self._end_of_pass)
        self._leave()
        self._clean()

    def _end_of_pass(self, _: Session, end: PassEnd) -> None:
        if self.watching and threading.get_ident() == self._thread:
            if end.loss_id == self._watched_loss:
                self._leave()
                self._clean()
                self._tell()
            return
        self._clean()
        for update in end.updates:
            if update.skipped_in_row >= self._after_skips:
                self._watch(update.loss_id)
                return

    def _watch(self, loss_id: int) -> None:
        models = list(self._models)
        trace = OverflowTrace(*models)
        with set_aside():
            trace.__enter__()
        self.trace, self._watched_loss, self._thread = trace, loss_id, threading.get_ident()
        for model in models:
            self._handles += [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward, always_call=True),
            ]

    def _leave(self) -> None:
        own_thread = threading.get_ident() == self._thread  # a mode is on in one thread only
        if self.watching and self.trace is not None and own_thread:
            self._watched_loss = None
            with set_aside(self.trace.mode):
                self.trace.unwatch()

    def _clean(self) -> None:
        """Removes all hooks."""
        if self.trace is not None and not self.watching:
            self.trace.__exit__(None, None, None)
            while self._handles:
                self._handles.pop().remove()

    def _tell(self) -> None:
        trace = self.trace
        if trace is None or trace.first is None or trace.first.cause == "gradients":
            return  # clean but for gradients that the skipped step left
        if ranks.rank() == 0:
            logging.getLogger("apex").warning(
                "%d or more steps in a row were skipped. %s", self._after_skips, trace
            )
        self.disarm()

    # Hooks of the models, while a step is watched. They only end the watch: torch is iterating
    # over them, so they are removed later.

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        self._error = sys.exc_info()[1]
        if not model.training or not torch.is_grad_enabled():
            self._leave()

    def _after_forward(self, *_: Any) -> None:
        if sys.exc_info()[1] is not self._error:
            self._leave()
