"""Samples updates and gradients for what 16 bits lose, without a host sync."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._core.dtypes import is_low_precision
from apex._engine.readback import Readback
from apex._torch import dtensor
from apex._torch.copies import capturing, moved
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.dynamo import untraced
from apex.debug.loops import Loop
from apex.debug.module_tracker import owner_of
from apex.debug.tensors import is_plain

EVERY = 16
"""Updates from one measurement to the next: its cost is spread over as many steps."""

SAMPLES = 256
"""Elements sampled of each parameter: a share is then known to 0.03 from one measurement."""

FROZEN = 0.5
"""Share of a module's weights that do not move, above which they are too many.

A weight large against its neighbours often keeps its value for a few updates and nothing is wrong;
where most do, the module no longer learns.
"""

UNDERFLOW = 0.1
"""Share of a module's gradients lost below fp16's range, from which they are too many.

For exponentially distributed magnitudes, the median of those left is then below four times the
smallest number: half of what is left has two significant bits or fewer.
"""

_SMALLEST = 2.0**-24  # of fp16
_EVIDENCE = 4  # gradients of that size, below which nothing is concluded


@dataclass(frozen=True)
class ModuleUpdates:
    """What 16 bits lost of the updates and gradients of one module's own parameters.

    All shares are of sampled elements, and between 0 and 1.

    Attributes:
        module: Qualified name; ``""`` for the model itself.
        weights: Number of sampled 16-bit weights that had a gradient and have no fp32 master.
        frozen: Share of these that the update left as they were, because it was below half of the
            weight's rounding step. 0 without such weights: a master holds the difference.
        gradients: Number of sampled gradients that may have been computed in fp16.
        zeros: Share of these that are zero.
        underflow: Share of these that are zero only because they were below fp16's range, as
            estimated from the gradients just above it (see ``docs/howto/watch.md``).
    """

    module: str
    weights: int
    frozen: float
    gradients: int
    zeros: float
    underflow: float


class Counts(NamedTuple):
    """Counts of one module's sampled elements.

    Attributes:
        weights: 16-bit weights with a gradient.
        unmoved: How many of these kept their value.
        gradients: Gradients.
        zeros: How many of these are zero.
        smallest: How many of these have the smallest magnitude of fp16.
    """

    weights: int
    unmoved: int
    gradients: int
    zeros: int
    smallest: int

    @property
    def underflow(self) -> float:
        """Estimated share of gradients that fp16 has rounded to zero.

        Note [Underflow]
            A zero does not tell whether fp16 made it, but its neighbours do: where gradients
            underflow, many others are just above, at fp16's smallest number 2**-24. For magnitudes
            with an exponential distribution, if a share r of the non-zero ones is at 2**-24, then
            1 - sqrt(1 - r) of all is below half of that, and has become zero. Zeros of dead units
            or unused rows have no such neighbours. Nor do gradients computed in fp32 or bf16, which
            are hardly ever exactly 2**-24.
        """
        if self.smallest < _EVIDENCE:
            return 0.0
        nonzero = self.gradients - self.zeros
        left = 1.0 - self.smallest / nonzero
        lost = nonzero * (1.0 / math.sqrt(left) - 1.0) if left > 0.0 else math.inf
        return min(lost, self.zeros) / self.gradients

    @property
    def all_zero(self) -> bool:
        """Whether there are gradients, all of them zero."""
        return self.zeros == self.gradients > 0


_NONE = Counts(0, 0, 0, 0, 0)

Measured = dict[str, Counts]
"""One measurement, by module."""


def summary(
    measured: Iterable[Measured], *, fp16: bool, modules: Iterable[str] = ()
) -> list[ModuleUpdates]:
    """Returns shares over several measurements, by module, in any case of ``modules``.

    Gradients that are all zero underflowed if another module's did, or, where ``fp16`` is known to
    have computed them, if all modules' are zero.
    """
    sums = dict.fromkeys(modules, _NONE)
    for name, counts in (item for each in measured for item in each.items()):
        known = sums.get(name, _NONE)
        sums[name] = Counts(*(a + b for a, b in zip(known, counts, strict=True)))
    watched = [counts for counts in sums.values() if counts.gradients]
    flushed = any(counts.underflow >= UNDERFLOW for counts in watched) or (
        fp16 and all(counts.all_zero for counts in watched)
    )
    return [
        ModuleUpdates(
            module=name,
            weights=counts.weights,
            frozen=counts.unmoved / max(counts.weights, 1),
            gradients=counts.gradients,
            zeros=counts.zeros / max(counts.gradients, 1),
            underflow=1.0 if flushed and counts.all_zero else counts.underflow,
        )
        for name, counts in sums.items()
    ]


class _Layout(NamedTuple):
    """Where the samples of an optimizer's parameters belong.

    Attributes:
        key: Identifies the parameters.
        modules: Names.
        owner: Index of each sample's module, [N].
        rounded: Whether fp16 may have rounded the gradient, [N].
        stored: Whether the gradient is stored in fp16, unscaled, [N].
        weights: Positions of the samples of 16-bit weights, [W].
    """

    key: tuple[int, ...]
    modules: list[str]
    owner: Tensor
    rounded: Tensor
    stored: Tensor
    weights: Tensor


class _Window(NamedTuple):
    """A measurement that has begun, on one device.

    Attributes:
        layout: Of its samples.
        weights: The 16-bit parameters.
        before: Their samples, [W].
        wanted: Which of these have a gradient, [W].
        counts: By module, [modules, 5].
    """

    layout: _Layout
    weights: list[weakref.ref[Tensor]]
    before: Tensor
    wanted: Tensor
    counts: Tensor


class UpdateWatch:
    """Measures every ``every``-th update of a loop's optimizers, over ``span`` updates."""

    def __init__(
        self, loop: Loop, arrived: Callable[[Measured], None], *, every: int, span: int = 1
    ) -> None:
        """Starts; ``arrived`` takes each measurement once it has reached the host.

        A weight may move in ``span`` updates, at most ``every``.
        """
        self._loop = loop
        self._arrived: Callable[[Measured], None] | None = arrived
        self._every, self._span = every, span
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._open: weakref.WeakKeyDictionary[Optimizer, _Window] = weakref.WeakKeyDictionary()
        self._layouts: weakref.WeakKeyDictionary[Optimizer, _Layout] = weakref.WeakKeyDictionary()
        self._readback: Readback[list[str]] = Readback()
        loop.add_step_hooks(self._before_step, self._after_step)

    def stop(self) -> None:
        """Passes on what is under way, and then nothing; idempotent. The loop removes the hooks."""
        self.poll(wait=True)
        self._arrived = None
        self._open.clear()
        self._layouts.clear()

    def poll(self, *, wait: bool = False) -> None:
        """Passes on the measurements that have arrived; with ``wait``, all."""
        for names, reading in self._readback.poll(wait=wait):
            rows = zip(*[iter(map(int, reading))] * len(Counts._fields), strict=True)
            if self._arrived is not None:
                self._arrived({n: Counts(*row) for n, row in zip(names, rows, strict=True)})

    @untraced
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        step = self._steps.get(optimizer, 0)
        if self._arrived is None or step % self._every or optimizer in self._open:
            return
        params = [*_measurable(optimizer, self._loop.may_underflow)]
        if not params or any(capturing(param.device) for param in params):
            return
        with suspend_modes():
            self._open[optimizer] = self._begin(optimizer, params)

    @untraced
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        step = self._steps.get(optimizer, 0)
        self._steps[optimizer] = step + 1
        if self._arrived is None or step % self._every != self._span - 1:
            return
        window = self._open.pop(optimizer, None)
        if window is not None and not capturing(window.counts.device):
            with suspend_modes():
                counts = _ended(window, optimizer)
                if counts is not None:
                    self._readback.send(window.layout.modules, counts)
        self.poll()

    def _begin(self, optimizer: Optimizer, params: list[Tensor]) -> _Window:
        found_inf = getattr(optimizer, "found_inf", None)
        scale = self._loop.gradient_scale(optimizer)
        layout = self._layout(optimizer, params)
        device = layout.owner.device
        values = _sampled([p.grad for p in params if p.grad is not None], device)
        wanted = (values != 0.0) & torch.isfinite(values)
        if scale is not None:
            values = torch.where(layout.stored, values, values * moved(scale, device))
        # A power of two has no bits in its significand.
        power = values.view(torch.int32) & 0x7FFFFF == 0
        smallest = wanted & power & (values.abs() <= _SMALLEST)
        rounded = layout.rounded & torch.isfinite(values)
        found = torch.stack([rounded, rounded & (values == 0.0), rounded & smallest], 1).float()
        counts = torch.zeros(len(layout.modules), len(Counts._fields), device=device)
        counts[:, 2:].index_add_(0, layout.owner, found)
        wanted = wanted[layout.weights]
        if found_inf is not None:
            runs = moved(found_inf, device) == 0.0
            counts, wanted = counts * runs, wanted & runs
        low = [param for param in params if is_low_precision(param)]
        return _Window(layout, [*map(weakref.ref, low)], _sampled(low, device), wanted, counts)

    def _layout(self, optimizer: Optimizer, params: list[Tensor]) -> _Layout:
        # Not the host, which would wait for the others.
        device = min((param.device for param in params), key=lambda each: each.type == "cpu")
        key = (*map(id, params), *(param.numel() for param in params))
        known = self._layouts.get(optimizer)
        if known is not None and known.key == key:
            return known
        names = self._loop.names()
        owners = [owner_of(names[id(param)]) for param in params]
        modules = list(dict.fromkeys(owners))
        counts = torch.tensor([_count(dtensor.local(param).numel()) for param in params])
        dtypes = [param.grad.dtype for param in params if param.grad is not None]
        may_underflow = self._loop.may_underflow

        def spread(values: list[Any]) -> Tensor:
            return torch.tensor(values).repeat_interleave(counts)

        self._layouts[optimizer] = _Layout(
            key,
            modules,
            moved(spread([modules.index(owner) for owner in owners]), device),
            moved(spread([may_underflow and t is not torch.bfloat16 for t in dtypes]), device),
            moved(spread([dtype is torch.float16 for dtype in dtypes]), device),
            moved(spread([is_low_precision(p) for p in params]).nonzero().flatten(), device),
        )
        return self._layouts[optimizer]


def _ended(window: _Window, optimizer: Optimizer) -> Tensor | None:
    """Returns the counts of a measurement; None if a parameter is gone or has another size."""
    params = [param for ref in window.weights if (param := ref()) is not None]
    after = _sampled(params, window.counts.device)
    if after.shape != window.before.shape:
        return None
    begin = 0
    for param in params:  # only now: the first step makes the state
        end = begin + _count(dtensor.local(param).numel())
        if _holds_difference(optimizer, param):
            window.wanted[begin:end] = False
        begin = end
    still = window.wanted & (after == window.before)
    found = torch.stack([window.wanted, still], 1).float()
    owner = window.layout.owner[window.layout.weights]
    window.counts[:, :2].index_add_(0, owner, found)
    return window.counts.flatten()


def _holds_difference(optimizer: Optimizer, param: Tensor) -> bool:
    """Returns whether the optimizer's state holds a master or a Kahan sum's compensation."""
    return any(
        isinstance(value, Tensor)
        and value.shape == param.shape
        and any(word in str(key).lower() for word in _KEEPERS)
        for key, value in optimizer.state.get(param, {}).items()
    )


_KEEPERS = ("master", "kahan", "compensation")
"""Parts of the names under which optimizers keep what a 16-bit weight cannot hold."""


def _measurable(optimizer: Optimizer, may_underflow: bool) -> Iterator[Tensor]:
    """Yields the parameters whose updates or gradients 16 bits may lose.

    Skips groups with a learning rate of 0, which are not to move.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, float | int) and rate == 0.0:
            continue
        for param in group["params"]:
            low = is_low_precision(param)
            if not (low or may_underflow):
                continue
            if not is_plain(type(param)) and not dtensor.is_dtensor(param):
                continue
            if param.grad is None:  # asked last: at O5, reading it would cost
                continue
            dtype = param.grad.dtype
            kept = dtype is torch.float32 or is_low_precision(param.grad)
            if kept and param.grad.layout is torch.strided:
                yield param


def _count(numel: int) -> int:
    return -(-numel // _stride(numel))


def _stride(numel: int) -> int:
    """Returns the distance of samples: odd, so that they do not all lie in one column."""
    distance = -(-numel // SAMPLES)
    return distance | 1


def _sampled(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Returns every so many elements of the local tensors in fp32, whatever their memory layout."""
    parts = []
    for values in dtensor.locals_of(tensors):
        size = values.numel()
        # take() reads these alone; flattening would copy a channels_last tensor whole
        places = torch.arange(0, size, _stride(size), device=values.device)
        parts.append(moved(values.take(places), device))
    return torch.cat(parts).float() if parts else torch.zeros(0, device=device)
