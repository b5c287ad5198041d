"""Applies functions to the tensors in nested containers; preserves types and identity."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apex._core import dtypes

T = TypeVar("T")
TensorFunction = Callable[[Tensor], Any]
ObjectFunction = Callable[[Any], Any]

# The most common types without tensors in forward calls, returned without further tests.
_LEAVES: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes)
_PLAIN: tuple[type, ...] = (list, tuple, dict)

_is_compiling = torch.compiler.is_compiling


def map_tensors(fn: TensorFunction, obj: T, convert: ObjectFunction | None = None) -> T:
    """Returns ``obj`` with ``fn`` applied to every tensor in lists, tuples, dicts and dataclasses.

    Containers keep their types and are not modified; one in which nothing changes is returned
    itself. An object that occurs in several places stays a single object; a container inside itself
    stays as it is. A read-only mapping becomes a dict, as in apex. Everything else is returned
    unchanged.

    Args:
        fn: Called once per tensor; returns the replacement, or the same tensor for no change.
        obj: A tensor, a container of tensors, or anything else.
        convert: Called with each object that is neither tensor nor module and has a ``to`` method,
            instead of traversing it; with ``None``, such objects are returned unchanged.
    """
    return _Walk(fn, convert).visit(obj)  # type: ignore[no-any-return]


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
    skip: Collection[int | str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments, mapped together as by :func:`map_tensors`.

    ``skip`` holds positions and names of arguments that stay as they are.
    """
    visit = _Walk(fn, convert).visit
    return (
        tuple([arg if at in skip else visit(arg) for at, arg in enumerate(args)]),
        {name: arg if name in skip else visit(arg) for name, arg in kwargs.items()},
    )


class Cast:
    """Casts tensors to a floating-point dtype.

    Args:
        dtype: The dtype.
        made: Receives the tensors that differ from what was given.
    """

    def __init__(self, dtype: torch.dtype, made: list[Tensor] | None = None) -> None:
        self._dtype = dtype
        self._made = made

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` in the dtype; the same object if it is not floating."""
        new = dtypes.cast(tensor, self._dtype)
        if self._made is not None and new is not tensor:
            self._made.append(new)
        return new

    def convert(self, obj: Any) -> Any:
        """Returns an object with a ``to`` method in the dtype; see :func:`converted`."""
        return converted(obj, self._dtype)


def cast_tensors(obj: T, dtype: torch.dtype) -> T:
    """Returns ``obj`` with every floating-point tensor in ``dtype``, in any nesting.

    Converts objects with their own ``to`` method by :func:`converted`. See :func:`map_tensors` for
    what is preserved.
    """
    cast = Cast(dtype)
    return map_tensors(cast, obj, cast.convert)


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments with every floating-point tensor in ``dtype``."""
    cast = Cast(dtype)
    return map_arguments(cast, args, kwargs, cast.convert)


def converted(obj: Any, dtype: torch.dtype) -> Any:
    """Returns ``obj.to(dtype)``, in which only floating-point tensors are cast.

    Works on a shallow copy, since some ``to`` methods change the object. One that takes no dtype (a
    batch of graphs) raises; then the object is returned as it is.
    """
    copied = obj
    if not _is_compiling():
        with contextlib.suppress(Exception):  # of an object that cannot be copied
            copied = copy.copy(obj)
    try:
        with _FloatingOnly():
            result = copied.to(dtype)
    except Exception as error:  # whatever the class raises for an argument that it does not know
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return obj
    if result is None:  # it works in place
        result = copied
    return obj if result is copied and _attributes(copied) == _attributes(obj) else result


def _attributes(obj: Any) -> dict[str, int]:
    """Returns the ``id`` of each value in the object's ``__dict__`` and slots."""
    slots = [name for kind in type(obj).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: id(getattr(obj, name, None)) for name in (*getattr(obj, "__dict__", ()), *slots)}


class _FloatingOnly(TorchFunctionMode):
    """Casts floating-point tensors only; others keep their dtype."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS and args[0].dtype not in dtypes.CASTABLE:
            if func is not Tensor.to:
                return args[0]
            args = tuple([arg for arg in args if arg not in dtypes.CASTABLE])
            kwargs = {key: arg for key, arg in kwargs.items() if arg not in dtypes.CASTABLE}
            if len(args) == 1 and not kwargs:
                return args[0]
        return func(*args, **kwargs)


_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.half, Tensor.bfloat16})


class _Walk:
    """One traversal: the functions to apply, and their results.

    Counts changes instead of comparing containers, which dynamo cannot trace.
    """

    def __init__(self, fn: TensorFunction, convert: ObjectFunction | None) -> None:
        self.fn = fn
        self.convert = convert
        self.done: dict[int, tuple[Any, Any]] = {}
        self.changes = 0

    def visit(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _LEAVES or isinstance(obj, (nn.Module, type)):
            return obj
        if isinstance(obj, Tensor):
            return self._mapped(obj, self.fn)
        # An object's own ``to`` takes precedence over its base type: a packed sequence is a named
        # tuple, a tokenizer's batch a dict. Looked up on the class: instances of attribute-style
        # dicts seem to have every attribute.
        if kind not in _PLAIN and callable(getattr(kind, "to", None)):
            return obj if self.convert is None else self._mapped(obj, self.convert)
        if isinstance(obj, (list, tuple, dict, Mapping)) or dataclasses.is_dataclass(obj):
            # dynamo can trace neither id() of a graph's tensor nor `is` of tuples.
            return self._rebuilt(obj) if _is_compiling() else self._mapped(obj, self._rebuilt)
        return obj

    def _mapped(self, obj: Any, fn: ObjectFunction) -> Any:
        if _is_compiling():
            new = fn(obj)
        elif id(obj) in self.done:
            new = self.done[id(obj)][1]
        else:
            self.done[id(obj)] = obj, obj  # a container inside itself finds this
            new = fn(obj)
            self.done[id(obj)] = obj, new
        if new is not obj:
            self.changes += 1
        return new

    def _rebuilt(self, obj: Any) -> Any:
        before = self.changes
        if isinstance(obj, (list, tuple)):
            items = [self.visit(item) for item in obj]
            return obj if self.changes == before else _sequence_like(obj, items)
        result = obj
        if isinstance(obj, Mapping):
            changed = self._changed(obj.items())
            if changed and type(obj) is dict:
                return {**obj, **changed}
            if changed:
                result = copy.copy(obj) if isinstance(obj, MutableMapping) else dict(obj)
                for key, value in changed.items():
                    result[key] = value
        if dataclasses.is_dataclass(result):
            changed = self._changed(
                [
                    (each.name, getattr(result, each.name, None))
                    for each in dataclasses.fields(result)
                ]
            )
            if changed:
                result = _copied(result) if result is obj else result
                for name, value in changed.items():
                    object.__setattr__(result, name, value)  # works on frozen ones, too
        return result

    def _changed(self, items: Any) -> dict[Any, Any]:
        """Returns what changes, by key."""
        changed = {}
        for key, old in items:
            before = self.changes
            new = self.visit(old)
            if self.changes != before:
                changed[key] = new
        return changed


def _sequence_like(obj: Any, items: list[Any]) -> Any:
    kind = type(obj)
    if kind is list or kind is tuple:
        return kind(items)
    if isinstance(obj, list):
        made = copy.copy(obj)
        made[:] = items
        return made
    if not isinstance(getattr(kind, "_fields", None), tuple):
        return kind(items)
    # Not by the class's own ``__new__``, which may not take the items; dynamo traces only that.
    return kind(*items) if _is_compiling() else tuple.__new__(kind, items)


def _copied(obj: Any) -> Any:
    """Returns a shallow copy of a dataclass; ``copy.copy`` is not traced before torch 2.12."""
    if not _is_compiling():
        return copy.copy(obj)
    made = object.__new__(type(obj))
    for field in dataclasses.fields(obj):
        object.__setattr__(made, field.name, getattr(obj, field.name))
    return made
