"""Exchanges the parameters that an optimizer holds, wherever it keeps them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from apex._engine.masters import PREPARED

_HOLDERS = (list, tuple, dict, set, Optimizer)


def exchange(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in place of those with these ids; dicts, lists and sets stay the same.

    In the groups, the state, and what else the optimizer keeps: some have lists or sets of
    parameters, dicts by parameter, or optimizers that they step themselves. Those that amp has
    prepared are left to it.
    """
    seen: dict[int, object] = {}
    left: list[Any] = [optimizer.param_groups, optimizer.state, vars(optimizer)]
    while left:
        held = left.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held  # itself, as its id could be reused
        if not isinstance(held, Optimizer):
            left += [item for item in _exchange_in(held, new) if isinstance(item, _HOLDERS)]
        elif PREPARED not in vars(held):
            left += [held.param_groups, held.state, vars(held)]


def _exchange_in(held: Any, new: Mapping[int, nn.Parameter]) -> list[Any]:
    """Exchanges what ``held`` holds itself; returns what may hold more."""
    if isinstance(held, dict):
        for key in [key for key in held if id(key) in new]:
            held[new[id(key)]] = held.pop(key)
        _exchange_at(held, held.keys(), held.values(), new)
        return [value for key, value in held.items() if not isinstance(key, nn.Parameter)]
    if isinstance(held, list):
        _exchange_at(held, range(len(held)), held, new)
    elif isinstance(held, set):
        for item in [item for item in held if id(item) in new]:
            held.remove(item)
            held.add(new[id(item)])
    return [*held]


def _exchange_at(
    held: Any, keys: Iterable[Any], items: Collection[Any], new: Mapping[int, nn.Parameter]
) -> None:
    for key, which, item in zip(keys, map(id, items), items, strict=True):
        if which in new:
            held[key] = new[which]
        elif item.__class__ is tuple and not new.keys().isdisjoint(map(id, item)):
            held[key] = tuple(new.get(id(each), each) for each in item)
