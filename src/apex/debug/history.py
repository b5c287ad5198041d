"""Records loss scales, skipped steps and gradient norms of a run without a host sync."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from apex._core import finite
from apex._core.arguments import integer
from apex._core.foreach import norms
from apex._engine.readback import Readback
from apex._torch import dtensor
from apex._torch.dispatch_modes import suspend_modes
from apex.debug.loops import LoopPass, loop_of
from apex.debug.module_tracker import owner_of
from apex.debug.rendering.formatting import counted, percent
from apex.debug.update_watch import EVERY, Measured, ModuleUpdates, UpdateWatch, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
            norm at ``scaler.unscale_``, before clipping, or else at the step.
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

    Every 16th step, the history also measures, on sampled elements of each parameter, which 16-bit
    weights the update leaves as they were and which gradients fp16 rounds to zero: ``modules``.
    Measured on one CPU core: 30 us of the host per parameter tensor and measurement. At O0, O4 and
    O5, it measures nothing: optimizers step fp32 weights, and gradients do not underflow.

    In a loop without ``amp.initialize``, each step of a plain optimizer is a pass. With its
    ``GradScaler``, skipped steps are recorded too, and all norms are of unscaled gradients.

    The history keeps neither models nor optimizers alive, and ends when the last reference to it
    does.

    Args:
        optimizers: Optimizers prepared by one ``amp.initialize`` call, or plain ones. The history
            ignores passes of other optimizers.
        scaler: The ``torch.amp.GradScaler`` of a plain loop.
        model: The model or models of a plain loop, for names.
        grad_norms: Whether to compute gradient norms.
        updates_every: Steps from one measurement of updates and gradients to the next, for
            ``modules``; None for no measurement.
        limit: Number of most recent passes, and of measurements, to keep (about 200 bytes for
            each pass, and for each module and measurement); None keeps all.

    Raises:
        ValueError: If no optimizer is given, or if the optimizers come from different
            ``initialize`` calls, or if amp has prepared them and a ``scaler`` is given; if
            ``updates_every`` or ``limit`` is neither None nor an integer of at least 1.
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
        updates_every: int | None = EVERY,
        limit: int | None = None,
    ) -> None:
        for name, value in (("updates_every", updates_every), ("limit", limit)):
            if value is not None:
                integer(name, value, least=1, others=", or None")
        if not optimizers:
            raise ValueError(
                "amp.debug.History got no optimizer. Pass one or more: History(optimizer)."
            )
        self._loop = loop_of("History", optimizers, scaler=scaler, models=model)
        self._grad_norms = grad_norms
        self._readback: Readback[int] = Readback()
        self._passes: deque[Pass] = deque(maxlen=limit)
        self._seen = 0
        names = self._loop.names()
        self._modules = [owner_of(names[id(param)]) for param in self._loop.params()]
        self._measured: deque[Measured] = deque(maxlen=limit)
        self._updates = None
        if updates_every is not None:
            self._updates = UpdateWatch(self._loop, self._measured.append, every=updates_every)
        self._loop.listen(weakref.proxy(self))
        weakref.finalize(self, self._loop.stop).atexit = False

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops recording and keeps the recorded passes; idempotent. Waits for the device."""
        if self._updates is not None:
            self._updates.stop()
        self._loop.stop()
        self._read(wait=True)

    @property
    def passes(self) -> list[Pass]:
        """The recorded passes, oldest first. Waits for the device."""
        self._read(wait=True)
        return list(self._passes)

    @property
    def modules(self) -> list[ModuleUpdates]:
        """What 16 bits lost of updates and gradients, by module. Waits for the device."""
        if self._updates is not None:
            self._updates.poll(wait=True)
        return summary(self._measured, fp16=self._loop.in_fp16, modules=self._modules)

    @property
    def skipped(self) -> int:
        """How many of ``passes`` overflowed."""
        return sum(item.overflow for item in self.passes)

    def __str__(self) -> str:
        """Returns a summary of a few lines. Waits for the device."""
        return passes_text(self.passes)

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
            prefix: Prefix of the tags ``loss_scale/0``, ``overflow/0`` and ``grad_norm/0``, and of
                ``frozen/MODULE`` and ``underflow/MODULE`` (the shares of ``modules``, at the last
                pass).
        """
        for module in self.modules:
            if module.weights:
                writer.add_scalar(f"{prefix}/frozen/{module.module}", module.frozen, self._seen - 1)
            if module.gradients:
                writer.add_scalar(
                    f"{prefix}/underflow/{module.module}", module.underflow, self._seen - 1
                )
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
            panel.grid(alpha=0.3)
        losses = _by_loss(passes)
        for loss_id, own in losses.items():
            points = [(item.index, item.loss_scale) for item in own]
            panels[0].step(*zip(*points, strict=True), where="post", label=f"loss {loss_id}")
            norms = [(item.index, item.grad_norm) for item in own if item.grad_norm]
            finite_norms = [(index, norm) for index, norm in norms if math.isfinite(norm)]
            if finite_norms:
                panels[-1].plot(*zip(*finite_norms, strict=True), label=f"loss {loss_id}")
        over = [(item.index, item.loss_scale) for item in passes if item.overflow]
        if over:
            label = f"overflow, step skipped ({len(over)})"
            panels[0].plot(*zip(*over, strict=True), "v", color="tab:red", label=label)
        if over or len(losses) > 1:
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
        for loss_id, (loss_scale, found_inf, *norm) in self._readback.poll(wait=wait):
            self._passes.append(
                Pass(
                    index=self._seen,
                    loss_id=loss_id,
                    loss_scale=loss_scale,
                    overflow=found_inf != 0.0,
                    grad_norm=norm[0] if norm else None,
                )
            )
            self._seen += 1


def passes_text(passes: Sequence[Pass]) -> str:
    """Returns a few lines for each loss, however many passes there are."""
    if not passes:
        return "No backward pass recorded yet."
    losses = _by_loss(passes)
    lines = []
    for loss_id, own in losses.items():
        name = f"Loss {loss_id}: " if len(losses) > 1 else ""
        skipped = sum(item.overflow for item in own)
        share = f" ({percent(skipped / len(own))})" if skipped else ""
        count = counted(len(own), "backward pass", "es")
        span = f"({own[0].index} to {own[-1].index})"
        lines.append(f"{name}{count} {span}, {skipped} skipped{share}")
        lines += (f"  {line}" for line in _details(own))
    return "\n".join(lines)


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
        values = [norm for norm, _ in norms]
        largest, index = max(norms)
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
