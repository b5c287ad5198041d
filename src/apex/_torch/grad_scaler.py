"""``torch.amp.GradScaler``: its signals to optimizers, and its iterations, for tools."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from apex._torch.copies import moved
from apex._torch.dispatch_modes import suspend_modes


def signals(scaler: Any, optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Returns the divisor of the gradients, if any, and the flag to skip the step, if any.

    ``GradScaler.step`` sets the same values on optimizers that take no ``grad_scaler`` argument.
    Does not wait for the device.
    """
    if not scaler.is_enabled():
        return None, None
    state = scaler._per_optimizer_states[id(optimizer)]
    unscaled = state["stage"] is OptState.UNSCALED
    flags = None if unscaled else scaler._check_inf_per_device(optimizer)
    found = list((flags or state["found_inf_per_device"]).values())
    total = torch.stack([moved(flag.reshape(()), found[0].device) for flag in found]).sum()
    return None if unscaled else scaler._get_scale_async(), total


Steps = Sequence[tuple[Optimizer, Tensor]]
"""The optimizers of an iteration, each with 0-d fp32: above 0 if its step was skipped."""


def on_update(
    scaler: GradScaler, before: Callable[[], Steps], after: Callable[[Steps, Tensor], None]
) -> Callable[[], None]:
    """Calls functions around a scaler's own ``update``; returns what ends it.

    The second takes what the first returned, and the new scale, 0-d.
    """
    watch = _Update(scaler, before, after)
    scaler.__dict__["update"] = watch
    return watch.stop


class _Update:
    """Stands before the ``update`` of one scaler; copied and pickled as the scaler's own."""

    def __init__(self, scaler: GradScaler, before: Any, after: Any) -> None:
        self._scaler = weakref.ref(scaler)
        self._inner: Any = scaler.__dict__.get("update")  # another watch
        self._told: Any = (before, after)

    def __call__(self, new_scale: float | Tensor | None = None) -> None:
        scaler = self._scaler()
        if scaler is None:
            return
        own = self._inner or type(scaler).update.__get__(scaler)
        if self._told is None or not scaler.is_enabled():
            own(new_scale)
            return
        before, after = self._told
        steps = before()
        own(new_scale)
        scale = scaler._get_scale_async()
        if scale is not None:
            after(steps, scale)

    def __reduce__(self) -> Any:
        return getattr, (self._scaler(), "update")  # of the copy, which has no watch

    def stop(self) -> None:
        """Ends it; idempotent."""
        scaler, self._told = self._scaler(), None
        while scaler is not None:  # what lies below a live watch goes with it
            top = scaler.__dict__.get("update")
            if not isinstance(top, _Update) or top._told is not None:
                return
            del scaler.__dict__["update"]
            if top._inner is not None:
                scaler.__dict__["update"] = top._inner


def skips(scaler: GradScaler, optimizers: Iterable[Optimizer]) -> Steps:
    """Returns those of the optimizers whose gradients a scaler has checked since its update."""
    states, found = scaler._per_optimizer_states, []
    for optimizer in optimizers:
        known = id(optimizer) in states  # reading it would create an entry
        flags = [*states[id(optimizer)]["found_inf_per_device"].values()] if known else []
        if flags:
            # A copy: `update` adds up the flags of all optimizers in place.
            with suspend_modes():
                each = [moved(flag.reshape(()), flags[0].device) for flag in flags]
                found.append((optimizer, torch.stack(each).sum()))
    return found


def current_scale(scaler: GradScaler) -> Tensor | None:
    """Returns the scale on its device, 0-d; None before the first loss."""
    return scaler._get_scale_async()


def holds_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's gradients are unscaled by now."""
    states = scaler._per_optimizer_states
    known = scaler.is_enabled() and id(optimizer) in states  # reading it would create an entry
    return not scaler.is_enabled() or (known and states[id(optimizer)]["stage"] != OptState.READY)
