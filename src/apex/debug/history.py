"""Records loss scales, skipped steps and gradient norms of a run without a host sync."""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apex._core import finite
from apex._engine.events import PassEnd
from apex._engine.optimizer.binding import Binding
from apex._engine.readback import Readback
from apex._engine.session import Session
from apex._torch import dtensor
from apex.debug.skips import require_session

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        index: Position in the history, counted from 0.
        loss_id: Index of the loss whose scale was used.
        loss_scale: Scale after the pass (multiplier).
        overflow: Whether a gradient held inf or NaN, so that the step is skipped. Always False with
            a static scale, for which gradients are not checked.
        grad_norm: L2 norm of the unscaled gradients of the pass's own optimizers, including what
            earlier passes accumulated; None with ``grad_norms=False``.
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

    The history keeps neither models nor optimizers alive.

    Args:
        optimizers: Optimizers prepared by one ``amp.initialize`` call. The history ignores passes
            of other optimizers.
        grad_norms: Whether to compute gradient norms.
        limit: Number of most recent passes to keep (about 200 bytes each); None keeps all.

    Raises:
        ValueError: If no optimizer is given, or if the optimizers come from different
            ``initialize`` calls.
        RuntimeError: If an optimizer was not prepared by amp.

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

    def __init__(self, *optimizers: Any, grad_norms: bool = True, limit: int | None = None) -> None:
        if not optimizers:
            raise ValueError(
                "amp.debug.History got no optimizer. Pass one returned by amp.initialize."
            )
        owners = [require_session(optimizer, "History") for optimizer in optimizers]
        session = owners[0][0]
        if any(other is not session for other, _ in owners):
            raise ValueError(
                "amp.debug.History got optimizers from different amp.initialize calls, whose loss "
                "ids overlap. Make one history per call."
            )
        self._session = weakref.ref(session)
        self._bindings = weakref.WeakSet(binding for _, binding in owners)
        self._grad_norms = grad_norms
        self._readback = Readback()
        self._losses: deque[int] = deque()
        self._passes: deque[Pass] = deque(maxlen=limit)
        self._seen = 0
        session.add_listener(self._end_of_pass)

    def __enter__(self) -> History:
        """Returns the history."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops recording."""
        self.stop()

    def stop(self) -> None:
        """Stops recording and keeps the recorded passes; idempotent. Waits for the device."""
        session = self._session()
        if session is not None:
            session.remove_listener(self._end_of_pass)
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
        """Returns a summary of a few lines. Waits for the device."""
        from apex.debug.history_summary import summary

        return summary(self.passes)

    def to_json(self) -> str:
        """Returns ``passes`` as a JSON array of objects.

        A norm of inf or NaN becomes a string (``"inf"``, ``"nan"``), as JSON has no such numbers.
        """
        return json.dumps([_plain(item) for item in self.passes], indent=1)

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
        from apex.debug.history_plot import figure

        return figure(self.passes)

    def _end_of_pass(self, session: Session, end: PassEnd) -> None:
        bindings = (binding for binding in end.bindings if isinstance(binding, Binding))
        own = [binding for binding in bindings if binding in self._bindings]
        if end.failed or not own:
            return
        scaler = session.scalers[end.loss_id]
        if self._readback.send(self._numbers(own, scaler.loss_scale, scaler.found_inf)):
            self._losses.append(end.loss_id)
        self._read(wait=False)

    @torch.no_grad()
    def _numbers(self, own: list[Binding], loss_scale: Tensor, found_inf: Tensor) -> Tensor:
        numbers = [loss_scale, found_inf]
        if self._grad_norms:
            numbers.append(_norm(own).to(loss_scale.device, torch.float32))
        return torch.stack(numbers)

    def _read(self, *, wait: bool) -> None:
        for loss_scale, found_inf, *norm in self._readback.poll(wait=wait):
            self._passes.append(
                Pass(
                    index=self._seen,
                    loss_id=self._losses.popleft(),
                    loss_scale=loss_scale,
                    overflow=found_inf != 0.0,
                    grad_norm=norm[0] if norm else None,
                )
            )
            self._seen += 1


def _norm(bindings: list[Binding]) -> Tensor:
    # Only the pass's own: in a GAN, it also leaves scaled gradients in the other network.
    grads = [p.grad for b in bindings for p in b.params() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(finite.dense_values(grads))
    return norm.full_tensor() if dtensor.is_dtensor(norm) else norm


def _plain(item: Pass) -> dict[str, Any]:
    return dict(_finite_items(asdict(item)))


def _finite_items(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        number = isinstance(value, float)
        yield name, str(value) if number and value - value != 0.0 else value
