"""Steps of optimizers that amp has not prepared: the one inside a SAM, or a script's own.

Those of masters read and write the model; those of the model's 16-bit weights are a mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex._core import dtypes
from apex._core.living import Living
from apex._core.param_groups import params_of
from apex._engine.masters import PREPARED, write_back_all
from apex._engine.mistakes import Mistake, Mistakes
from apex._engine.optimizer import step
from apex._engine.optimizer.exchange import holds
from apex._engine.tracked_pair import Master
from apex._torch.autograd import backward_id
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.binding import Binding

_living: Living[Binding] = Living()

_first_steps: WeakKeyDictionary[Optimizer, list[tuple[Mistakes, nn.Parameter, int]]] = (
    WeakKeyDictionary()
)
"""16-bit weights, with their versions, that another optimizer would write in its first step."""

_skips: WeakKeyDictionary[Optimizer, list[tuple[nn.Parameter, Tensor | None]]] = WeakKeyDictionary()
"""Gradients that overflowed, hidden from a step; none where its kernel reads the flag."""


def watch(binding: Binding) -> None:
    """Has other optimizers' steps of the binding's parameters do what the binding's own do."""
    _living.add(binding)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    """Hooks into every step of the process.

    Once and for good: a hook that comes or goes, perhaps in another thread or in a garbage
    collection, breaks off a step for which torch is calling the hooks.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@untraced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Hands masters what a plain backward pass, or a script, left in the model.

    The step does nothing where prepared optimizers skip theirs, unless a closure makes other
    gradients.
    """
    if PREPARED in optimizer.__dict__ or not _living or backward_id() != -1:
        return
    _end_skip(optimizer)  # of a step that failed: what overflowed is of no use
    if optimizer not in _first_steps:
        _first_steps[optimizer] = [*_written_to(optimizer)]
    stepped = set(map(id, params_of(optimizer)))
    checked: list[Binding] = []
    for binding in _living:
        if not binding.is_live or binding.gradients.stepping:
            continue
        if stepped.isdisjoint(map(id, binding.params())):
            continue
        alone = optimizer.param_groups is not binding.optimizer.param_groups
        plain = alone and binding.has_plain_gradients()
        binding.settle(steps=True)
        if plain:  # the optimizer's zero_grad does not clear the model's gradients
            binding.gradients.take_mirrors()
        if binding.gradients.overflow.checked and not holds(optimizer, binding.optimizer):
            checked.append(binding)
    if checked and not any(map(callable, (*args[1:], *kwargs.values()))):
        _skip_overflow(optimizer, checked)


def _skip_overflow(optimizer: Any, checked: Sequence[Binding]) -> None:
    """Has a step do nothing if a gradient overflowed: its kernel reads that, or gets none."""
    if len(checked) == 1 and step.reads_flag(optimizer, checked[0]):
        _skips[optimizer] = []
        optimizer.found_inf = checked[0].gradients.overflow.found_inf
    elif any(map(step.overflowed, checked)):
        for binding in checked:
            binding.gradients.settle()
        _skips[optimizer] = [(param, param.grad) for param in params_of(optimizer)]
        for param, _ in _skips[optimizer]:
            param.grad = None


def _end_skip(optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Returns the gradients that a step was not to see."""
    hidden = _skips.pop(optimizer, None)
    if hidden is not None:
        vars(optimizer).pop("found_inf", None)
    return hidden or []


@untraced
def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Counts what the step wrote, and rounds masters into the model."""
    if PREPARED in optimizer.__dict__ or not _living:
        return  # amp rounds the masters of prepared ones itself
    for param, grad in _end_skip(optimizer):
        param.grad = grad
    if not any(binding.pairs for binding in _living):
        return
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for mistakes, param, version in _first_steps.get(optimizer, ()):
        if fused or param._version != version:
            mistakes.warn(Mistake.UNPREPARED_OPTIMIZER)
    _first_steps[optimizer] = []
    stepped = [param for param in params_of(optimizer) if _is_master(param)]
    for param in (*stepped, *(param for _, param, _ in _written_to(optimizer))):
        increment_version(param)  # fused kernels do not
    if stepped:
        if backward_id() != -1:
            _check_gradients(optimizer)
        write_back_all()


def _is_master(param: nn.Parameter) -> bool:
    own = type(param) is not nn.Parameter  # a fast way out: isinstance runs Python for parameters
    return own and isinstance(param, Master)


def _written_to(optimizer: Optimizer) -> Iterator[tuple[Mistakes, nn.Parameter, int]]:
    """Yields the 16-bit weights among the optimizer's parameters that have masters."""
    low = [param for param in params_of(optimizer) if dtypes.is_low_precision(param)]
    owners = {id(owner): owner for each in _living if low and (owner := each.owner) is not None}
    for owner in owners.values():
        for param in low:
            if owner.masters.pair_of(param) is not None:
                yield owner.mistakes, param, param._version


def _check_gradients(optimizer: Optimizer) -> None:
    """Raises if a step in a hook of a backward pass has missed gradients, which models have."""
    stepped = set(map(id, params_of(optimizer)))
    pairs = (pair for binding in _living for pair in binding.pairs if id(pair.master) in stepped)
    if any(pair.master.grad is None and pair.model.grad is not None for pair in pairs):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called during a backward pass (by a hook) on "
            "fp32 masters, which have no gradients yet: amp has prepared another optimizer, which "
            "holds this one. Pass those that step to amp.initialize instead, as a list."
        )
