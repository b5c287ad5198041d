"""The parameters that an optimizer steps, and their state."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, tree

PREPARED = "_apex_prepared"
"""Attribute of a prepared optimizer that holds amp's state, which is no part of the optimizer."""

_FUSED_ADAM = "apex.optimizers.fused_adam"


def is_trained(param: nn.Parameter) -> bool:
    """Returns whether optimizers step ``param``: torch's step a frozen one that has a gradient."""
    return param.requires_grad or param.grad is not None


def params_of(optimizer: Optimizer | None) -> list[nn.Parameter]:
    """Returns the parameters of all groups, in order; none without groups, or an optimizer."""
    params: list[nn.Parameter] = []
    for group in getattr(optimizer, "param_groups", ()):
        params += group["params"]
    return params


def states_in(state: Mapping[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yields each parameter in an optimizer's state, with the parameter's own state.

    Skips other keys, which torch allows: some optimizers count their steps under a name.
    """
    for param, own in state.items():
        if isinstance(param, Tensor):
            yield param, own


def is_from(optimizer: Any, module: str) -> bool:
    """Returns whether the optimizer's class, or a base class, is from this module."""
    return any(kind.__module__ == module for kind in type(optimizer).__mro__)


def exchange(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Replaces the parameters with these ids, and the ids, wherever the optimizer holds them.

    Searches its attributes, containers and objects of its own package. Containers keep their
    identity.
    """
    _Exchange(optimizer, new).in_attributes(optimizer)


class _Exchange:
    """Exchanges parameters, and their ids, in what belongs to an optimizer."""

    def __init__(self, optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
        self._new = new
        self._package = _package_of(optimizer)
        self._seen: set[int] = set()

    def in_attributes(self, holder: object) -> None:
        """Exchanges in the attributes of an object."""
        attributes = vars(holder)
        for name, value in list(attributes.items()):
            if name != PREPARED:
                attributes[name] = self._of(value)

    def _of(self, value: Any) -> Any:
        """Returns what takes the place of a value: itself, but for parameters, ids and tuples."""
        if isinstance(value, Tensor):
            return self._new.get(id(value), value)
        if type(value) is int:
            return id(self._new[value]) if value in self._new else value
        if isinstance(value, tuple):
            items = tuple(self._named_in(item, value) for item in value)
            make = getattr(value, "_make", tuple)  # that of a named tuple
            return value if _are_same(items, value) else make(items)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, list | deque | set | MutableMapping):
            self._in_container(value)
        elif isinstance(value, Optimizer) or self._is_own(value):
            self.in_attributes(value)
        return value

    def _named_in(self, item: Any, names: tuple[Any, ...]) -> Any:
        """Returns what takes the place of a tuple's item.

        Where the tuple names parameters by a module and attributes, an object with these.
        """
        if not isinstance(item, nn.Module | SimpleNamespace):
            return self._of(item)
        known = item._parameters if isinstance(item, nn.Module) else vars(item)
        named = {name: value for name, value in known.items() if name in names}
        new = {name: self._of(param) for name, param in named.items()}
        return item if _are_same(new.values(), named.values()) else SimpleNamespace(**new)

    def _in_container(self, container: Any) -> None:
        is_mapping = isinstance(container, MutableMapping)
        items = [*container.items()] if is_mapping else [*container]
        changed = [*map(self._of, items)]
        if isinstance(container, list):
            container[:] = changed
        elif not _are_same(changed, items):
            container.clear()
            refill = container.extend if isinstance(container, deque) else container.update
            refill(changed)

    def _is_own(self, value: object) -> bool:
        is_object = hasattr(value, "__dict__") and not isinstance(value, type | nn.Module)
        return is_object and _package_of(value) == self._package != "torch"


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _are_same(first: Iterable[object], second: Iterable[object]) -> bool:
    return all(map(operator.is_, first, second))


def move_state(optimizer: Optimizer) -> None:
    """Moves each parameter's state to its device, also in optimizers that the optimizer contains.

    As torch does for a loaded state: the count of steps stays on the host if no kernel reads it.
    """
    for holder in optimizers_in(optimizer):
        for group in holder.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for param in group["params"]:
                to_device = operator.methodcaller("to", param.device)
                state = holder.state.get(param, {})
                for key, value in state.items():
                    stays = key == "step" and not on_device
                    if not stays:
                        state[key] = tree.map_tensors(to_device, value)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds, perhaps in a list."""
    optimizers = [optimizer]
    for holder in optimizers:  # which grows meanwhile
        for value in vars(holder).values():
            parts = value if isinstance(value, list | tuple) else [value]
            for held in parts:
                if isinstance(held, Optimizer) and held not in optimizers:
                    optimizers.append(held)
    return optimizers


def dtypes_of(optimizers: Iterable[Optimizer]) -> list[torch.dtype]:
    """Returns the dtypes of all parameters that the optimizers step, in order."""
    return [param.dtype for optimizer in optimizers for param in params_of(optimizer)]


def match_states(optimizers: Sequence[Optimizer], before: Iterable[torch.dtype]) -> None:
    """Casts optimizer state to the new dtype of its parameter, as torch's kernels require.

    Needed for parameters converted in place (O3).

    Args:
        optimizers: Optimizers whose parameters were converted, or exchanged for masters.
        before: Their :func:`dtypes_of` before that.
    """
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    old_dtypes = dict(zip(map(id, params), before, strict=True))
    for optimizer in optimizers:
        for part in optimizers_in(optimizer):
            if is_from(part, _FUSED_ADAM):  # also NVIDIA's: its state stays fp32
                continue
            dtype_of = getattr(part, "state_dtype", operator.attrgetter("dtype"))
            for param, state in states_in(getattr(part, "state", {})):
                old = old_dtypes.get(id(param), param.dtype)
                _cast_state(state, param, old, dtype_of(param))


def _cast_state(state: dict[str, Any], param: Tensor, old: torch.dtype, new: torch.dtype) -> None:
    # A state with codes also contains their scales, in fp32 for parameters of any dtype.
    if any(map(dtypes.is_code, tree.tensors(state))):
        return

    def cast(value: Tensor) -> Tensor:
        is_count = value.dim() == 0 and param.dim() > 0
        if is_count or value.dtype is not old:
            return value
        return value.to(new)

    # Counts stay exact. All state of a 0-d parameter is 0-d; its count is known by name.
    for name, value in state.items():
        if name != "step":
            state[name] = tree.map_tensors(cast, value)
