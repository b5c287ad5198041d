"""Applies functions to the tensors in nested containers; preserves types and identity."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apex._core.dtypes import CASTABLE
from apex._torch.dynamo import is_compiling

T = TypeVar("T")
LeafFunction = Callable[[Any], Any]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]
"""Positional and keyword arguments."""


def map_leaves(fn: LeafFunction, obj: T) -> T:
    """Returns ``obj`` with ``fn`` applied to its leaves, in any nesting.

    Leaves are tensors, and objects other than modules and dicts whose class has a method ``to``.
    Lists, tuples, deques, mappings and dataclasses are searched. Containers keep their types and
    are not modified; one in which nothing changes is returned itself. A mapping that cannot be
    copied becomes a dict, as in apex. Everything else is returned unchanged, and so is a container
    inside itself.

    Args:
        fn: Called with each leaf; returns the replacement, or the same leaf for no change.
        obj: A leaf, a container of leaves, or anything else.
    """
    new = _replacement(fn, obj)
    return obj if new is _SAME else new


def map_tensors(fn: Callable[[Tensor], Any], obj: T) -> T:
    """Returns ``obj`` with ``fn`` applied only to its tensors; see :func:`map_leaves`."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, obj)


def tensors(obj: object) -> list[Tensor]:
    """Returns the tensors in any nesting; see :func:`map_leaves` for what is searched."""
    if isinstance(obj, Tensor):  # saves 3 us in each forward pass
        return [obj]
    listed: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        listed.append(tensor)
        return tensor

    map_tensors(note, obj)
    return listed


def before_backward(output: object, hook: Callable[[Any], None]) -> bool:
    """Calls ``hook`` when a backward pass reaches a tensor in ``output``, with its gradients.

    Returns whether there is a tensor that one can reach.
    """
    # Each once: thousands of tensors may come from one.
    nodes = {tensor.grad_fn for tensor in tensors(output) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(hook)
    return bool(nodes)


def cast(leaf: T, dtype: torch.dtype) -> T:
    """Returns a tensor in ``dtype``, or another object with a ``to`` as :func:`_converted`.

    Returns the same object if there is nothing to cast. Differentiable. Returns tensors that are
    not castable (integer, complex, ...) unchanged.
    """
    if not isinstance(leaf, Tensor):
        return _converted(leaf, dtype)  # type: ignore[no-any-return]
    if leaf.dtype is dtype or leaf.dtype not in CASTABLE:
        return leaf
    if type(leaf) is Tensor:
        return leaf.to(dtype)  # type: ignore[return-value]
    # The ``to`` of a subclass may need attributes, which results of operators lack.
    result: Any = Tensor.to(leaf, dtype)
    for name, value in vars(leaf).items():
        vars(result).setdefault(name, value)
    return result  # type: ignore[no-any-return]


def cast_tensors(obj: T, dtype: torch.dtype) -> T:
    """Returns ``obj`` with every floating-point tensor in ``dtype``, in any nesting.

    See :func:`map_leaves` for what is preserved.
    """
    return map_leaves(functools.partial(cast, dtype=dtype), obj)


def cast_arguments(
    args: Args,
    kwargs: Kwargs,
    dtype: torch.dtype,
    *,
    objects: bool = True,
    skip: Collection[int | str] = (),
) -> Call:
    """Returns a call's arguments as :func:`cast_tensors` does.

    Without ``objects``, those with a ``to`` method stay as they are, and so do the arguments whose
    positions and names ``skip`` holds.
    """
    walk = map_leaves if objects else map_tensors
    cast_leaf = functools.partial(cast, dtype=dtype)
    cast_args = [*args]
    for at, arg in enumerate(args):
        if at not in skip:
            cast_args[at] = walk(cast_leaf, arg)
    cast_kwargs = {**kwargs}
    for name, arg in kwargs.items():
        if name not in skip:
            cast_kwargs[name] = walk(cast_leaf, arg)
    return tuple(cast_args), cast_kwargs


def _converted(obj: Any, dtype: torch.dtype) -> Any:
    """Returns ``obj.to(dtype)``, in which only floating-point tensors are cast.

    Works on a shallow copy, since some ``to`` methods change the object. Returns the object itself
    if nothing is cast, or if its ``to`` takes no dtype (a batch of graphs) and raises.
    """
    copied = obj
    if not is_compiling():
        with contextlib.suppress(Exception):  # of an object that cannot be copied
            copied = copy.copy(obj)
            # Also containers, as ``to`` may assign to their items.
            for name, value in vars(copied).items():
                if type(value) in (list, dict):
                    vars(copied)[name] = value.copy()
    floating_only = _FloatingOnly()
    try:
        with floating_only:
            result = copied.to(dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever the class raises for an argument it does not know
        return obj
    if not floating_only.has_changed:
        return obj
    return copied if result is None else result  # None: it works in place


class _FloatingOnly(TorchFunctionMode):
    """Leaves tensors as they are that are not castable.

    Attributes:
        has_changed: Whether anything has been cast, or done that is not a cast.
    """

    has_changed = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_cast = func in _CASTS
        if is_cast and args[0].dtype not in CASTABLE:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if not is_cast or result is not args[0]:
            self.has_changed = True
        return result


_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.half, Tensor.bfloat16})


_WITHOUT_TENSORS = (int, float, str, bytes, type(None), type, nn.Module)
"""Classes of values that hold no tensor to cast; scripts pass thousands of numbers."""

_SEQUENCES = (list, tuple, deque, UserList)

_SAME: Any = object()
"""Stands for no change: dynamo cannot trace a comparison of containers."""


def _replacement(fn: LeafFunction, obj: Any, outer: tuple[Any, ...] = ()) -> Any:
    """Returns what takes the place of ``obj``; ``_SAME`` if no leaf in it changes.

    Args:
        fn: See :func:`map_leaves`.
        obj: The object.
        outer: Containers and dataclasses that hold it, to which it may refer back.
    """
    if isinstance(obj, _WITHOUT_TENSORS):
        return _SAME
    # An object's own ``to`` takes precedence over its base type: a packed sequence is a named
    # tuple. Not that of a dict, such as a tokenizer's batch, which may take devices alone. Looked
    # up on the class: objects with ``__getattr__`` seem to have every attribute.
    is_dict = isinstance(obj, (dict, UserDict))
    if not is_dict and callable(getattr(type(obj), "to", None)):
        new = fn(obj)
        return _SAME if new is obj else new
    # dynamo can compare dataclasses, and not containers.
    is_compared = not is_compiling() or dataclasses.is_dataclass(obj)
    if is_compared and any(holder is obj for holder in outer):
        return _SAME
    if is_compared:
        outer = (*outer, obj)
    items: Iterable[tuple[Any, Any]]
    if isinstance(obj, _SEQUENCES):
        items = enumerate(obj)
    elif isinstance(obj, Mapping):
        items = obj.items()
    elif dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj)]
        items = [(name, getattr(obj, name, None)) for name in names]
    else:
        return _SAME
    changes = {}
    for key, item in items:
        new = _replacement(fn, item, outer)
        if new is not _SAME:
            changes[key] = new
    return _changed_copy(obj, changes) if changes else _SAME


def _changed_copy(obj: Any, changes: Mapping[Any, Any]) -> Any:
    """Returns a copy of a container or dataclass with some of its items changed."""
    if not isinstance(obj, (*_SEQUENCES, Mapping)):
        result = copy.copy(obj)
        for name, value in changes.items():
            object.__setattr__(result, name, value)  # also works on frozen ones
        return result
    items = _writable(obj)
    for key, value in changes.items():
        items[key] = value
    return _tuple_like(obj, items) if isinstance(obj, tuple) else items


def _writable(obj: Any) -> Any:
    """Returns a copy of a container with its own items: a list for a tuple.

    A mapping whose copy may be a view on the same items becomes a dict.
    """
    if isinstance(obj, tuple):
        return list(obj)
    if type(obj) in (list, dict):
        return obj.copy()  # dynamo does not trace copy.copy
    has_own_items = isinstance(obj, (*_SEQUENCES, dict))
    if isinstance(obj, MutableMapping) and callable(getattr(type(obj), "__copy__", None)):
        has_own_items = True
    if has_own_items:
        return copy.copy(obj)
    return dict(obj)


def _tuple_like(obj: Any, items: list[Any]) -> Any:
    """Returns a tuple of the class of ``obj`` with these items, and its attributes."""
    cls = type(obj)
    is_named = hasattr(cls, "_fields")
    attributes = getattr(obj, "__dict__", None)
    # dynamo traces only the class's own ``__new__``.
    if is_compiling() or (attributes is None and not is_named):
        if is_named:
            return cls(*items)
        return cls(items)
    made = tuple.__new__(cls, items)  # as the class's own ``__new__`` may not take the items
    if attributes:
        made.__dict__.update(attributes)
    return made
