"""Steps of optimizers that amp has not prepared: casts of sessions are off in them, too.

Note [Steps that raise]
    torch calls no hook after a step that raised an exception. Casts then stay off until the next
    forward or amp call of the thread, as in Note [Ambient casts].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from apex._engine.autocast import ambient
from apex._engine.autocast.region import devices_of_sessions

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class UncastStep(ambient.UncastBlock):
    """One step in which casts are off, but for its closure."""

    devices = staticmethod(devices_of_sessions)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns ``closure`` with the casts from around the step."""

        def evaluate() -> Any:
            ambient.uncast_steps().remove(self)
            self.__exit__()
            try:
                return closure()
            finally:
                self.__enter__()
                ambient.uncast_steps().append(self)

        return evaluate


def begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Begins a step without casts; returns its arguments if they hold a closure."""
    step = UncastStep(optimizer)
    step.__enter__()
    ambient.uncast_steps().append(step)
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": step.with_casts(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        itself, closure, *others = args
        return (itself, step.with_casts(closure), *others), kwargs
    return None


def end(optimizer: Optimizer) -> None:
    """Ends the innermost step of an optimizer, and those inside it that raised."""
    steps: Any = ambient.uncast_steps()
    if not any(step.optimizer is optimizer for step in steps):
        return  # an amp call inside the step has ended it
    while True:
        step = steps.pop()
        step.__exit__()
        if step.optimizer is optimizer:
            return
