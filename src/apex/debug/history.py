"""What a run's loss scales and gradients did, collected without a host sync and read later."""

from __future__ import annotations

import json
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
from apex.debug.skips import prepared

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        index: Passes before it that this history saw.
        loss_id: Whose scale it was.
        loss_scale: The scale after the pass (multiplier).
        overflow: Whether a gradient held inf or NaN, so that the step is skipped; never for a
            static scale, which checks nothing.
        grad_norm: L2 norm of the unscaled gradients of the pass's own optimizers, those accumulated
            before included; None where it was not asked for.
    """

    index: int
    loss_id: int
    loss_scale: float
    overflow: bool
    grad_norm: float | None


class History:
    """Collects the loss scale, skips and gradient norms of every backward pass.

    A pass leaves a few numbers on the device and a copy of them on its way to the host; nothing
    waits. They are read when somebody asks for ``passes``, then waiting for the last ones. One
    gradient norm is two kernels a pass, ``grad_norms=False`` leaves it out.

    Passes that do not move the scale (``delay_unscale``, ``delay_overflow_check``, ``no_sync``)
    are left out, as are those inside a CUDA graph. With sharded parameters the norm is that of all
    shards, which the ranks work out together: collect on all of them or on none.

    Args:
        optimizers: Prepared by one ``amp.initialize`` call; passes of others are left out.
        grad_norms: Whether to compute gradient norms.
        limit: How many passes to keep, the last ones; None for all (about 200 bytes each).

    Raises:
        ValueError: Without an optimizer, or for ones of different ``initialize`` calls.
        RuntimeError: For one that is not prepared.

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
            raise ValueError("amp.debug.History got no optimizer. Pass one that amp prepared.")
        owners = [prepared(optimizer, "History") for optimizer in optimizers]
        self._session: Session = owners[0][0]
        if any(session is not self._session for session, _ in owners):
            raise ValueError(
                "amp.debug.History got optimizers of different amp.initialize calls, whose losses "
                "have the same numbers. Make one history for each call."
            )
        self._bindings: list[Binding] = [binding for _, binding in owners]
        self._grad_norms = grad_norms
        self._readback = Readback()
        self._losses: deque[int] = deque()
        self._passes: deque[Pass] = deque(maxlen=limit)
        self._seen = 0
        self._session.add_listener(self._end_of_pass)

    def __enter__(self) -> History:
        """Returns itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops."""
        self.stop()

    def stop(self) -> None:
        """Ends the collection; what was collected stays. May be called again."""
        self._session.remove_listener(self._end_of_pass)

    @property
    def passes(self) -> list[Pass]:
        """Every pass so far, oldest first. Waits for the device."""
        self._read(wait=True)
        return list(self._passes)

    @property
    def skipped(self) -> int:
        """Passes among ``passes`` that overflowed."""
        return sum(item.overflow for item in self.passes)

    def to_json(self) -> str:
        """Returns ``passes`` as a JSON array of objects.

        A norm that is inf or NaN is a string there (``"inf"``, ``"nan"``): JSON has no such number.
        """
        return json.dumps([_plain(item) for item in self.passes], indent=1)

    def to_tensorboard(self, writer: Any, prefix: str = "amp") -> None:
        """Adds every pass to a ``torch.utils.tensorboard.SummaryWriter``, or what has its method.

        Args:
            writer: Its ``add_scalar(tag, value, step)`` is called, with the index of the pass.
            prefix: In front of the tags ``loss_scale/0``, ``overflow/0`` and ``grad_norm/0``.
        """
        for item in self.passes:
            writer.add_scalar(f"{prefix}/loss_scale/{item.loss_id}", item.loss_scale, item.index)
            writer.add_scalar(f"{prefix}/overflow/{item.loss_id}", int(item.overflow), item.index)
            if item.grad_norm is not None:
                writer.add_scalar(f"{prefix}/grad_norm/{item.loss_id}", item.grad_norm, item.index)

    def plot(self) -> Figure:
        """Returns a matplotlib figure: scales with their overflows marked, and gradient norms.

        Raises:
            ImportError: Without matplotlib.
        """
        from apex.debug.history_plot import figure

        return figure(self.passes)

    def _end_of_pass(self, session: Session, end: PassEnd) -> None:
        own = [binding for binding in self._bindings if binding in end.bindings]
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
    # Those of the pass only: in a GAN it leaves scaled gradients in the other network.
    grads = [p.grad for b in bindings for p in b.params() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(finite.dense_values(grads))
    return norm.full_tensor() if dtensor.is_dtensor(norm) else norm


def _plain(item: Pass) -> dict[str, Any]:
    return dict(_finite_items(asdict(item)))


def _finite_items(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        number = isinstance(value, float)
        yield name, str(value) if number and value - value != 0.0 else value
