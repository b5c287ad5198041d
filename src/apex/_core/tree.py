"""Applies functions to the tensors in nested containers; preserves types and identity."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._torch.dynamo import at_tracing, traces_copy

T = TypeVar("T")
TensorFunction = Callable[[Tensor], Any]
ObjectFunction = Callable[[Any], Any]

# The most common types without tensors in forward calls, returned without further tests.
_LEAVES: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes)
_PLAIN: tuple[type, ...] = (list, tuple, dict)

# The concrete types come first, because a test against an abstract one takes ten times as long.
_WRITABLE: tuple[type, ...] = (dict, list, deque, MutableMapping)
_WITH_ITEMS: tuple[Any, ...] = (*_WRITABLE, Mapping)

_COPYING = frozenset(
    {
        *("__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
        *("__getnewargs__", "__getnewargs_ex__", "__slots__"),
    }
)
"""What a class defines that decides how its instances are copied."""

_is_compiling = torch.compiler.is_compiling


def map_tensors(fn: TensorFunction, obj: T, convert: ObjectFunction | None = None) -> T:
    """Returns ``obj`` with ``fn`` applied to every tensor in any nesting.

    Containers keep their types (namedtuples, dataclasses, subclasses of dict, list and tuple) and
    are not modified; one in which nothing changes is returned itself. An object that occurs in
    several places stays a single object, also in cyclic containers. A read-only mapping becomes a
    dict, as in apex. Everything else (strings, arrays, modules, sets, iterators) is returned
    unchanged.

    Args:
        fn: Called once per tensor; returns the replacement, or the same tensor for no change.
        obj: A tensor, a container of tensors, or anything else.
        convert: Called with each object that is neither tensor nor module and has a ``to`` method,
            instead of traversing it; with ``None``, such objects are returned unchanged.
    """
    return _Walk(fn, convert).map([obj])[0]  # type: ignore[no-any-return]


def tensors(obj: object) -> list[Tensor]:
    """Returns the tensors in any nesting; see :func:`map_tensors` for what is searched."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, obj)
    return found


def map_arguments(
    fn: TensorFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    convert: ObjectFunction | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments, mapped together as by :func:`map_tensors`."""
    found = _Walk(fn, convert).map([*args, *kwargs.values()])
    # By position: dynamo cannot inspect tuples and dicts that it has built itself.
    return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))


def cast_tensors(obj: T, dtype: torch.dtype) -> T:
    """Returns ``obj`` with every floating-point tensor in ``dtype``, in any nesting.

    Converts objects with their own ``to`` method by ``obj.to(dtype)``. See :func:`map_tensors` for
    what is preserved.
    """
    kind = type(obj)
    if kind is Tensor:
        return dtypes.cast(obj, dtype)  # type: ignore[return-value, arg-type]
    if kind in _LEAVES:
        return obj
    return map_tensors(lambda t: dtypes.cast(t, dtype), obj, lambda o: converted(o, dtype))


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments with every floating-point tensor in ``dtype``."""
    if len(args) == 1 and not kwargs:
        return (cast_tensors(args[0], dtype),), kwargs
    return map_arguments(
        lambda t: dtypes.cast(t, dtype), args, kwargs, lambda o: converted(o, dtype)
    )


def converted(obj: Any, dtype: torch.dtype) -> Any:
    """Returns ``obj.to(dtype)``."""
    result = obj.to(dtype)
    # A ``to`` without a return value works in place.
    return obj if result is None else result


class _Walk:
    """One traversal: the functions to apply, their results, and the path to the current object.

    Counts changes instead of comparing containers, which dynamo cannot trace.
    """

    def __init__(self, fn: TensorFunction, convert: ObjectFunction | None) -> None:
        self.fn = fn
        self.convert = convert
        self.tensors: list[tuple[Any, Any]] = []
        self.done: dict[int, tuple[Any, Any]] = {}
        self.path: list[Any] = []
        self.changes = 0
        self.cyclic = False

    def map(self, values: list[Any]) -> list[Any]:
        found = [self.visit(value) for value in values]
        if not (self.cyclic and self.changes):
            return found
        again = _CyclicWalk(self.fn, self.convert)
        again.done = {id(old): (old, new) for old, new in self.tensors}
        return [again.visit(value) for value in values]

    def visit(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _LEAVES:
            return obj
        if isinstance(obj, Tensor):
            return self._changed(obj, self._mapped(obj, self.fn))
        if isinstance(obj, (nn.Module, type)):
            return obj
        # An object's own ``to`` takes precedence over its base type: a packed sequence is a named
        # tuple, a tokenizer's batch a dict. Looked up on the class: instances of attribute-style
        # dicts seem to have every attribute.
        if kind not in _PLAIN and callable(getattr(kind, "to", None)):
            if self.convert is None:
                return obj
            return self._changed(obj, self._mapped(obj, self.convert))
        return self._container(obj)

    def _changed(self, old: Any, new: Any) -> Any:
        if new is not old:
            self.changes += 1
        return new

    def _mapped(self, obj: Any, fn: ObjectFunction) -> Any:
        if _is_compiling():  # dynamo cannot trace id() of a graph's tensor
            for old, new in self.tensors:
                if old is obj:
                    return new
            self.tensors.append((obj, fn(obj)))
            return self.tensors[-1][1]
        if id(obj) not in self.done:
            self.done[id(obj)] = obj, fn(obj)
            self.tensors.append(self.done[id(obj)])
        return self.done[id(obj)][1]

    def _container(self, obj: Any) -> Any:
        if _is_compiling():
            return self._rebuilt(obj)
        if id(obj) in self.done:
            return self._changed(obj, self.done[id(obj)][1])
        if any(obj is parent for parent in self.path):
            self.cyclic = True
            return obj
        self.path.append(obj)
        result = self._rebuilt(obj)
        self.path.pop()
        if not self.cyclic:
            self.done[id(obj)] = obj, result
        return result

    def _rebuilt(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is dict:
            changes = self._changes(obj.items())
            return {**obj, **changes} if changes else obj
        if kind is list or isinstance(obj, tuple):
            before = self.changes
            items = [self.visit(item) for item in obj]
            if self.changes == before:
                return obj
            return items if kind is list else _tuple_like(obj, items)
        result = obj
        if isinstance(obj, _WITH_ITEMS) and (changes := self._changes(_items(obj))):
            result = dict(obj) if _becomes_dict(obj) else _copied(obj)
            _set_items(result, changes)
        if dataclasses.is_dataclass(obj) and (changes := self._changes(_fields(result))):
            result = _copied(result)
            _set_fields(result, changes)
        return result

    def _changes(self, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        changes = {}
        for key, old in items:
            before = self.changes
            new = self.visit(old)
            if self.changes != before:
                changes[key] = new
        return changes


class _CyclicWalk(_Walk):
    """A traversal of cyclic containers, which copies each one before visiting its items."""

    def _container(self, obj: Any) -> Any:
        if id(obj) in self.done:
            return self.done[id(obj)][1]
        if isinstance(obj, tuple):
            items = [self.visit(item) for item in obj]
            # Visiting the items may have come back to this tuple and built it.
            return self.done.setdefault(id(obj), (obj, _tuple_like(obj, items)))[1]
        result, has_items = obj, isinstance(obj, _WITH_ITEMS)
        if has_items or dataclasses.is_dataclass(obj):
            result = dict(obj) if _becomes_dict(obj) else _copied(obj)
        self.done[id(obj)] = obj, result
        if has_items:
            _set_items(result, {key: self.visit(value) for key, value in _items(obj)})
        if dataclasses.is_dataclass(obj):
            _set_fields(result, {name: self.visit(value) for name, value in _fields(obj)})
        return result


def _tuple_like(obj: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kind = type(obj)
    if kind is tuple:
        return tuple(items)
    if _is_compiling() and not traces_copy:  # nor is ``tuple.__new__`` traced on torch 2.6
        return kind(*items)
    try:
        # Bypasses the class's own ``__new__``, which may not take the items.
        result = tuple.__new__(kind, items)
    except TypeError:  # torch.return_types: C types, which only their constructor creates
        return kind(items)
    if kind.__dictoffset__:  # a subclass; plain namedtuples have no attributes
        result.__dict__.update(obj.__dict__)
    return result


def _items(obj: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values by which a container is read and, in its copy, written."""
    if isinstance(obj, (list, deque)):
        return enumerate(obj)
    return obj.items() if isinstance(obj, _WRITABLE) or _becomes_dict(obj) else ()


def _set_items(obj: Any, items: dict[Any, Any]) -> None:
    for key, value in items.items():
        obj[key] = value


def _fields(obj: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(obj, field.name, None)) for field in dataclasses.fields(obj)]


def _set_fields(obj: Any, values: dict[str, Any]) -> None:
    # dataclasses.replace() would run ``__post_init__`` and reject fields with ``init=False``.
    for name, value in values.items():
        object.__setattr__(obj, name, value)  # works on frozen dataclasses, too


def _becomes_dict(obj: Any) -> bool:
    """Returns whether an object is a read-only mapping, without a dataclass's fields to write."""
    read_only = not isinstance(obj, _WRITABLE) and isinstance(obj, Mapping)
    return read_only and not dataclasses.is_dataclass(obj)


def _copied(obj: Any) -> Any:
    """Returns a shallow copy of a container.

    ``copy.copy`` is not traced before torch 2.12, and on Python 3.10 it asks the instance for
    ``__getstate__``, to which an attribute-style dict answers with an item.
    """
    kind: Any = type(obj)
    by_fields = _is_compiling() and dataclasses.is_dataclass(obj) and not traces_copy
    if not _copies_by_attributes(kind) or (_is_compiling() and not by_fields):
        return copy.copy(obj)
    result = kind.__new__(kind)
    if isinstance(obj, dict):
        dict.update(result, obj)
    elif isinstance(obj, list):
        list.extend(result, obj)
    if by_fields:  # dynamo has no __dict__ to read either
        for name, value in _fields(obj):
            object.__setattr__(result, name, value)
    else:
        result.__dict__.update(obj.__dict__)
    return result


@at_tracing
def _copies_by_attributes(kind: type) -> bool:
    """Returns whether instances are their items and attributes, and do not say how to copy them."""
    own = {name for parent in kind.__mro__[:-1] for name in vars(parent)}
    base = next((base for base in (dict, list) if issubclass(kind, base)), object)
    made_by_default = getattr(kind, "__new__", None) is getattr(base, "__new__", None)
    return made_by_default and kind.__dictoffset__ != 0 and own.isdisjoint(_COPYING)
