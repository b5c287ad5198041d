"""The signals of ``torch.amp.GradScaler`` for optimizers that unscale gradients themselves."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from apex._torch.copies import moved


def signals(scaler: Any, optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Returns the divisor of the gradients, if any, and the flag to skip the step, if any.

    ``GradScaler.step`` sets the same values on optimizers that take no ``grad_scaler`` argument.
    Does not wait for the device.

    Args:
        scaler: The ``torch.amp.GradScaler`` that scaled the gradients.
        optimizer: The optimizer to step.
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
    """Returns every enabled ``GradScaler`` of the process; takes some 20 ms.

    A loss carries no reference to the scaler that scaled it.
    """
    # type(), because a proxy's __class__ may be a property with side effects.
    found = (each for each in gc.get_objects() if issubclass(type(each), GradScaler))
    return [scaler for scaler in found if scaler.is_enabled()]


class StepOfInstances:
    """A class's ``step``, whose ``grad_scaler`` an instance takes but does not show.

    Where ``GradScaler.step`` finds it in the signature it passes itself by a deprecated protocol,
    and warns. Else it sets ``grad_scale`` and ``found_inf``.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        """Wraps a class's own ``step``."""
        signature = inspect.signature(step)

        @functools.wraps(step)
        def of_instance(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return step(optimizer, *args, **kwargs)

        shown = [each for each in signature.parameters.values() if each.name != "grad_scaler"]
        of_instance.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        self._of_class, self._of_instance = step, cast(FunctionType, of_instance)

    def __get__(self, optimizer: Optimizer | None, owner: type[Optimizer]) -> Any:
        """Returns the function, or an instance's method."""
        if optimizer is None:
            return self._of_class
        return self._of_instance.__get__(optimizer, owner)

    @classmethod
    def install(cls, owner: type[Optimizer]) -> None:
        """Puts one on a class whose ``step`` is ours; torch replaces it with the first instance.

        A user's own ``step`` stays, for its signature may ask for the protocol.
        """
        step: Any = owner.step
        ours = inspect.unwrap(step).__module__.split(".")[0] == "apex"
        if ours and not isinstance(inspect.getattr_static(owner, "step"), cls):
            owner.step = cls(step)  # type: ignore[method-assign, assignment]
