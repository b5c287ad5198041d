"""``torch.amp.GradScaler``: its signals to optimizers, and its iterations, for tools."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

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


def enabled_scalers() -> list[GradScaler]:
    """Returns every enabled ``GradScaler`` of the process; takes some 20 ms, and 0.2 s if any is.

    A loss carries no reference to the scaler that scaled it.
    """
    if _found():
        gc.collect()  # those of an earlier loop, such as a notebook's, may only be garbage
    return _found()


def _found() -> list[GradScaler]:
    # type(), because a proxy's __class__ may be a property with side effects.
    found = (each for each in gc.get_objects() if issubclass(type(each), GradScaler))
    return [scaler for scaler in found if scaler.is_enabled()]


class ScalerListener(Protocol):
    """Hears of a GradScaler's iterations."""

    def gradients_complete(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Called once the gradients of an iteration are complete, before the step.

        ``scale``, 0-d, is the factor that they still carry; None if they are unscaled.
        """

    def scale_updated(self, steps: Sequence[tuple[Optimizer, Tensor]], scale: Tensor) -> None:
        """Called after ``scaler.update()``, with the new scale, 0-d.

        Each optimizer of the iteration comes with 0-d fp32: above 0 if its step was skipped.
        """


class Watch:
    """Calls a listener from a GradScaler's own methods, without a host sync.

    The scaler gets a generated subclass of its class. It is copied and pickled as its own class,
    without the watch.
    """

    def __init__(self, scaler: GradScaler, listener: ScalerListener) -> None:
        self._scaler: weakref.ref[GradScaler] = weakref.ref(scaler)
        self.listener = listener
        if _WATCHES not in scaler.__dict__:
            own = type(scaler)
            names = {each: getattr(own, each) for each in ("__module__", "__qualname__", "__doc__")}
            scaler.__class__ = type(own.__name__, (_WatchedScaler, own), names)
            scaler.__dict__.update({_WATCHES: [], _STEPS: []})
        scaler.__dict__[_WATCHES].append(self)

    def stop(self) -> None:
        """Ends it; the last one gives the scaler its own class back. Idempotent."""
        scaler = self._scaler()
        watches = [] if scaler is None else scaler.__dict__.get(_WATCHES, [])
        if scaler is None or self not in watches:
            return
        watches.remove(self)
        if not watches:
            del scaler.__dict__[_WATCHES], scaler.__dict__[_STEPS]
            scaler.__class__ = type(scaler).__bases__[1]


_WATCHES = "_apex_watches"
_STEPS = "_apex_steps"


class _WatchedScaler(GradScaler):
    """Overrides of a watched scaler; never instantiated."""

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            self._tell_gradients(optimizer, None)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        scales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if scales_itself and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self._tell_gradients(optimizer, self._get_scale_async())
        result = super().step(optimizer, *args, **kwargs)
        flags = [*self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
        if flags and _STEPS in self.__dict__:
            # A copy: `update` adds up the flags of all optimizers in place.
            with suspend_modes():
                each = [moved(flag.reshape(()), flags[0].device) for flag in flags]
                found = torch.stack(each).sum()
            self.__dict__[_STEPS].append((optimizer, found))
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        scale = self._get_scale_async()
        if not self.is_enabled() or scale is None:
            return
        steps, self.__dict__[_STEPS] = self.__dict__[_STEPS], []
        for watch in tuple(self.__dict__[_WATCHES]):
            watch.listener.scale_updated(steps, scale)

    def _tell_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        for watch in tuple(self.__dict__[_WATCHES]):
            watch.listener.gradients_complete(optimizer, scale)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: item for name, item in state.items() if name not in (_WATCHES, _STEPS)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies by the scaler's own class, so that no generated class is named."""
        return object.__new__, (type(self).__bases__[1],), self.__getstate__()


def current_scale(scaler: GradScaler) -> Tensor | None:
    """Returns the scale on its device, 0-d; None if disabled or before the first loss."""
    return scaler._get_scale_async() if scaler.is_enabled() else None


def holds_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's gradients are unscaled by now."""
    states = scaler._per_optimizer_states
    known = scaler.is_enabled() and id(optimizer) in states  # reading it would create an entry
    return not scaler.is_enabled() or (known and states[id(optimizer)]["stage"] != OptState.READY)
