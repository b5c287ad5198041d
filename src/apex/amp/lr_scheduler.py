"""Learning-rate schedules that a skipped step does not advance."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from apex._core.arguments import kind
from apex._engine.optimizer.optimizer_class import binding_of
from apex._torch.copies import HostCopy
from apex.amp.optimizers import unwrap


def skip_aware(scheduler: Any, optimizer: Any = None) -> SkipAwareScheduler:
    """Returns a view of ``scheduler`` that skipped steps do not advance.

    For schedules that count steps: call its ``step()`` after each ``optimizer.step()``. On a CPU,
    and with optimizers that amp skips on the host (all but fused ones), it does not advance after a
    skipped step. On a device, where the answer arrives later, it advances and stands still once
    when the answer has arrived, so it may be ahead by the skips of the last few steps. It never
    waits for the device.

    Schedules that count epochs need none of this. At levels that skip nothing (O0, O3, O4, O5) and
    where amp is disabled, every step advances.

    Args:
        scheduler: A ``torch.optim.lr_scheduler``, or any object with ``step``, ``state_dict`` and
            ``load_state_dict``.
        optimizer: The optimizer; by default ``scheduler.optimizer``.

    Raises:
        TypeError: If there is no optimizer, or the scheduler is one.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        >>> scheduler = amp.lr_scheduler.skip_aware(halving)
        >>> for value in (1.0, float("inf"), 1.0):
        ...     optimizer.zero_grad()
        ...     with amp.scale_loss(model(torch.full((1, 2), value)).sum(), optimizer) as scaled:
        ...         (scaled / 2**10).backward()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()
        [0.25]
    """
    if isinstance(scheduler, Optimizer):
        raise TypeError(
            f"amp.lr_scheduler.skip_aware got {kind(scheduler)} instead of a scheduler. Pass the "
            "scheduler, which knows its optimizer: skip_aware(scheduler)."
        )
    if optimizer is None:
        optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None:
        raise TypeError(
            f"amp.lr_scheduler.skip_aware got {kind(scheduler)} without an optimizer. "
            "Pass it: skip_aware(scheduler, optimizer)."
        )
    return SkipAwareScheduler(scheduler, optimizer)


class SkipAwareScheduler:
    """The view that :func:`skip_aware` returns; other attributes are the scheduler's own.

    Attributes:
        scheduler: The scheduler itself.
    """

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        """Creates a view of ``scheduler``, which follows the steps of ``optimizer``."""
        self.scheduler = scheduler
        self._optimizer = unwrap(optimizer)
        self._in_flight: deque[HostCopy] = deque()
        self._ahead = 0
        self._seen = -1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the schedule, unless the optimizer's step was skipped."""
        self._collect()
        if self._was_skipped():
            return
        if self._ahead:
            self._ahead -= 1
        else:
            self.scheduler.step(*args, **kwargs)

    def _was_skipped(self) -> bool:
        """Returns whether the last step is known to be skipped; asks the device otherwise."""
        binding = binding_of(self._optimizer)
        if binding is None or binding.gradients.overflow.steps == self._seen:
            return False
        overflow = binding.gradients.overflow
        self._seen = overflow.steps
        known = overflow.skipped_on_host()
        if known is None and isinstance(overflow.skipped, Tensor):
            self._in_flight.append(HostCopy(overflow.skipped))
        return bool(known)

    def _collect(self, *, wait: bool = False) -> None:
        while self._in_flight and (wait or self._in_flight[0].arrived):
            self._ahead += bool(self._in_flight.popleft().wait())  # sync: only for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state and ``skips_ahead``; waits for answers in flight."""
        self._collect(wait=True)
        return {**self.scheduler.state_dict(), "skips_ahead": self._ahead}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this view, or of a plain scheduler."""
        own = dict(state_dict)
        ahead = int(own.pop("skips_ahead", 0))
        self.scheduler.load_state_dict(own)
        self._in_flight.clear()
        self._ahead = ahead

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # copy and pickle look up attributes before it exists
            raise AttributeError(name)
        return getattr(self.scheduler, name)
