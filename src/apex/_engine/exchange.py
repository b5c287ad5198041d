"""Exchanges the parameters that an optimizer holds: in groups, state, lists and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def exchange(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in place of those with these ids; containers keep their identity.

    Looks at the groups, the state, the optimizers that it holds, and one level of lists and dicts
    beside them.
    """
    if not new:
        return
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            _renew(group["params"], new)
        _renew(each.state, new)
        for name, held in vars(each).items():
            if name not in ("param_groups", "state"):
                _renew(held, new)
                for item in held.values() if isinstance(held, dict) else _items(held):
                    _renew(item, new)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds, perhaps in a list."""
    found = [optimizer]
    for each in found:
        found += [held for held in _held_by(each) if not any(held is known for known in found)]
    return found


def _held_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    for held in vars(optimizer).values():
        for each in held if isinstance(held, list | tuple) else (held,):
            if isinstance(each, Optimizer):
                yield each


def _items(held: Any) -> list[Any]:
    return held if isinstance(held, list) else []


def _renew(held: Any, new: Mapping[int, nn.Parameter]) -> None:
    if isinstance(held, list):
        held[:] = [_renewed(item, new) for item in held]
    elif isinstance(held, dict):
        for key, value in list(held.items()):
            other = _renewed(value, new)
            if other is not value:
                held[key] = other
            renewed = _renewed(key, new)
            if renewed is not key:
                held[renewed] = held.pop(key)
    elif isinstance(held, set):
        for item in [item for item in held if id(item) in new]:
            held.remove(item)
            held.add(new[id(item)])


def _renewed(item: Any, new: Mapping[int, nn.Parameter]) -> Any:
    """Returns what takes the place of a parameter, or of a tuple with some."""
    if type(item) is tuple and not new.keys().isdisjoint(map(id, item)):
        return tuple(new.get(id(each), each) for each in item)
    return new.get(id(item), item)
