"""Exchanges the parameters that an optimizer holds, wherever it keeps them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from apex._core.param_groups import params_in
from apex._engine.masters import PREPARED

_HOLDERS = (list, tuple, dict, set, Optimizer)


def exchange(
    optimizer: Optimizer,
    new: Mapping[int, nn.Parameter],
    groups: list[dict[str, Any]] | None = None,
) -> None:
    """Puts other parameters in place of those with these ids; dicts, lists and sets stay the same.

    In the groups, the state, and what else the optimizer keeps: some have lists or sets of
    parameters, dicts by parameter, or optimizers that they step themselves. Those that amp has
    prepared are left to it.

    Args:
        optimizer: The optimizer.
        new: Parameters by the id of the one that each replaces.
        groups: The only groups to look at, where the others and their state cannot hold any;
            ``None`` for all.
    """
    if not new:
        return
    for param in () if groups is None else params_in(groups):
        if id(param) in new and param in optimizer.state:
            optimizer.state[new[id(param)]] = optimizer.state.pop(param)
    for held in _held_by(optimizer, groups):
        if isinstance(held, dict):
            for key in [key for key in held if _renewed(key, new) is not key]:
                held[_renewed(key, new)] = held.pop(key)
            _exchange_at(held, held.keys(), held.values(), new)
        elif isinstance(held, list):
            _exchange_at(held, range(len(held)), held, new)
        elif isinstance(held, set):
            for item in [item for item in held if id(item) in new]:
                held.remove(item)
                held.add(new[id(item)])


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds, except those that amp has prepared."""
    held = (each for each in _held_by(optimizer) if isinstance(each, Optimizer))
    return [optimizer, *(each for each in held if PREPARED not in vars(each))]


def holds(optimizer: Optimizer, inner: Optimizer) -> bool:
    """Returns whether an optimizer keeps another one, as a wrapper does that steps it."""
    return any(each is inner for each in _held_by(optimizer))


def _held_by(optimizer: Optimizer, groups: list[dict[str, Any]] | None = None) -> Iterator[Any]:
    """Yields what may hold parameters; what is in it follows, as it then is."""
    every = [optimizer.param_groups, optimizer.state]
    seen: dict[int, object] = {} if groups is None else {id(each): each for each in every}
    left: list[Any] = [vars(optimizer), *(every if groups is None else groups)]
    while left:
        held = left.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held  # itself, as its id could be reused
        yield held
        if not isinstance(held, Optimizer):
            left += [item for item in _contents(held) if isinstance(item, _HOLDERS)]
        elif PREPARED not in vars(held):
            left += [held.param_groups, held.state, vars(held)]


def _contents(held: Any) -> list[Any]:
    """Returns what a container holds, except what a dict has for each parameter."""
    if not isinstance(held, dict):
        return [*held]
    return [value for key, value in held.items() if not isinstance(key, nn.Parameter)]


def _exchange_at(
    held: Any, keys: Iterable[Any], items: Collection[Any], new: Mapping[int, nn.Parameter]
) -> None:
    for key, item in zip(keys, items, strict=True):
        other = _renewed(item, new)
        if other is not item:
            held[key] = other


def _renewed(item: Any, new: Mapping[int, nn.Parameter]) -> Any:
    """Returns what takes the place of a parameter or a tuple of them; other items as they are."""
    if item.__class__ is tuple and not new.keys().isdisjoint(map(id, item)):
        return tuple(new.get(id(each), each) for each in item)
    return new.get(id(item), item)
