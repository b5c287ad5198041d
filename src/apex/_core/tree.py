"""Apply a function to every tensor in nested containers, keeping types and identity."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from apex._core import dtypes

T = TypeVar("T")
TensorFunction = Callable[[Tensor], Any]
ObjectFunction = Callable[[Any], Any]

# Values met most often in forward calls that hold no tensor: answered without any further test.
_LEAVES: frozenset[type] = frozenset({type(None), bool, int, float, complex, str, bytes})


def map_tensors(fn: TensorFunction, obj: T, convert: ObjectFunction | None = None) -> T:
    """Returns ``obj`` with ``fn`` applied to every tensor in any nesting.

    Containers keep their types (namedtuples, dataclasses, subclasses of dict, list and tuple) and
    are never changed in place; wherever nothing below changed, the very same object comes back.
    Everything else (strings, arrays, modules, sets, iterators) is returned untouched.

    Args:
        fn: Called with each tensor; returns its replacement, or the same tensor for no change.
        obj: A tensor, a container of tensors, or anything else.
        convert: Called with each object that is neither tensor nor module and has a ``to`` method,
            instead of looking into it; such an object stays untouched where this is ``None``.
    """
    return _Walk(fn, convert).visit(obj)  # type: ignore[no-any-return]


def cast_tensors(obj: T, dtype: torch.dtype) -> T:
    """Returns ``obj`` with every floating tensor in ``dtype``, in any nesting.

    Objects with a ``to`` method of their own are converted by ``obj.to(dtype)``. See
    :func:`map_tensors` for what else is kept.
    """
    kind = type(obj)
    if kind is Tensor:
        return dtypes.cast(obj, dtype)  # type: ignore[return-value, arg-type]
    if kind in _LEAVES:
        return obj
    return map_tensors(lambda t: dtypes.cast(t, dtype), obj, lambda o: _converted(o, dtype))


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with every floating tensor in ``dtype``."""
    cast_args = tuple([cast_tensors(arg, dtype) for arg in args])
    if not kwargs:
        return cast_args, kwargs
    return cast_args, {name: cast_tensors(arg, dtype) for name, arg in kwargs.items()}


def _converted(obj: Any, dtype: torch.dtype) -> Any:
    result = obj.to(dtype)
    # A ``to`` without a return value works in place.
    return obj if result is None else result


class _Walk:
    """One traversal: the functions to apply and the objects on the path to the current one.

    Changes are counted rather than found by comparing containers, which dynamo cannot trace.
    """

    def __init__(self, fn: TensorFunction, convert: ObjectFunction | None) -> None:
        self.fn = fn
        self.convert = convert
        self.path: list[Any] = []
        self.changes = 0

    def visit(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _LEAVES:
            return obj
        if isinstance(obj, Tensor):
            return self._changed(obj, self.fn(obj))
        if kind is list or kind is tuple:
            return self._sequence(obj)
        if kind is dict:
            changes = self._changes(obj.items())
            return {**obj, **changes} if changes else obj
        if isinstance(obj, (nn.Module, type)):
            return obj
        return self._special(obj)

    def _changed(self, old: Any, new: Any) -> Any:
        if new is not old:
            self.changes += 1
        return new

    def _sequence(self, obj: Any) -> Any:
        before = self.changes
        items = [self.visit(item) for item in obj]
        if self.changes == before:
            return obj
        return items if type(obj) is list else tuple(items)

    def _special(self, obj: Any) -> Any:
        # An object's own ``to`` goes first: it knows more of its class than its base type tells
        # (a packed sequence is a named tuple, a tokenizer's batch a dict).
        # Asked of the class: instances of attribute-style dicts answer to any name.
        if callable(getattr(type(obj), "to", None)):
            return obj if self.convert is None else self._changed(obj, self.convert(obj))
        # Objects refer to each other in cycles (a tree whose nodes know their parent).
        if any(obj is parent for parent in self.path):
            return obj
        self.path.append(obj)
        try:
            return self._rebuilt(obj)
        finally:
            self.path.pop()

    def _rebuilt(self, obj: Any) -> Any:
        if isinstance(obj, tuple):
            return self._tuple(obj)
        result = obj
        if isinstance(obj, MutableMapping):
            result = _with_items(result, self._changes(obj.items()))
        elif isinstance(obj, (list, deque)):
            result = _with_items(result, self._changes(enumerate(obj)))
        if dataclasses.is_dataclass(obj):
            result = self._fields(result)
        return result

    def _tuple(self, obj: tuple[Any, ...]) -> tuple[Any, ...]:
        before = self.changes
        items = [self.visit(item) for item in obj]
        if self.changes == before:
            return obj
        kind = type(obj)
        try:
            # Past the class's own ``__new__``, which may take other arguments than the items.
            result = tuple.__new__(kind, items)
        except TypeError:  # torch.return_types: C types, which only their own constructor makes
            return kind(items)
        if kind.__dictoffset__:  # a class of its own on top; a plain namedtuple has no attributes
            result.__dict__.update(obj.__dict__)
        return result

    def _fields(self, obj: Any) -> Any:
        values = [(f.name, getattr(obj, f.name, None)) for f in dataclasses.fields(obj)]
        changes = self._changes(values)
        if not changes:
            return obj
        # A copy rather than ``replace``: fields with ``init=False`` and ``__post_init__`` stay out.
        result = copy.copy(obj)
        for name, value in changes.items():
            object.__setattr__(result, name, value)  # frozen ones too
        return result

    def _changes(self, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        changes = {}
        for key, old in items:
            before = self.changes
            new = self.visit(old)
            if self.changes != before:
                changes[key] = new
        return changes


def _with_items(obj: Any, changes: dict[Any, Any]) -> Any:
    if not changes:
        return obj
    result = copy.copy(obj)
    for key, value in changes.items():
        result[key] = value
    return result
