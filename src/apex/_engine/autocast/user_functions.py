"""Casts for user functions: decorated ones, and ones registered by module and name."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION, cast
from apex._core.tree import map_arguments, tensors
from apex._engine.autocast.region import UncastRegion, active_dtype

Kind = Literal["low_precision", "bfloat16", "float", "promote"]
"""How a user function's arguments are cast.

``low_precision``: every floating tensor to the region's dtype.
``bfloat16``: every floating tensor to bfloat16.
``float``: fp16 and bf16 tensors to fp32, with casts off inside; float64 stays.
``promote``: every floating tensor to the widest floating dtype among them.
"""

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "_apex_cast_kind"
_uncast = UncastRegion(users=True)


def cast_function(fn: Callable[P, R], kind: Kind) -> Callable[P, R]:
    """Returns ``fn`` with casts of its tensor arguments, however nested.

    With casts off, it calls ``fn`` directly.

    Works on functions, methods, ``autograd.Function.apply`` and custom operators, and under
    ``torch.compile``. Casting a cast function again replaces its kind.

    Raises:
        ValueError: If ``kind`` is unknown.
        TypeError: If ``fn`` is not callable.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"Unknown cast kind {kind!r}; use one of {', '.join(get_args(Kind))}.")
    if not callable(fn):
        raise TypeError(f"amp can cast callables only; got {type(fn).__name__} {fn!r}.")
    plain: Callable[P, R] = getattr(fn, "__wrapped__", fn) if _is_cast(fn) else fn

    @functools.wraps(plain)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        dtype = active_dtype()
        if dtype is None:
            return plain(*args, **kwargs)
        cast_args, cast_kwargs = map_arguments(_rule(kind, dtype, args, kwargs), args, kwargs)
        if kind == "float":
            return _uncast.run(plain, *cast_args, **cast_kwargs)
        return plain(*cast_args, **cast_kwargs)

    setattr(wrapper, _MARK, kind)
    return wrapper


class UserRegistry:
    """Registered functions of other modules, replaced by cast versions while a session lives.

    A session may end in another thread, or in a garbage collection at any point of ``apply``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._applied: list[_Replaced] = []
        self._sessions = 0

    def register(self, module: ModuleType | type, name: str, kind: Kind) -> None:
        """Registers ``module.name`` to be cast while a session lives; the latest kind wins.

        Raises:
            ValueError: If the module has no such function, or the kind is unknown.
            TypeError: If ``name`` is not a string.
        """
        where = getattr(module, "__name__", repr(module))
        if kind not in get_args(Kind):
            raise ValueError(f"Unknown cast kind {kind!r}; use one of {', '.join(get_args(Kind))}.")
        if not isinstance(name, str):
            raise TypeError(
                f"amp.register_*_function got {name!r}; it takes a module and the name of a "
                "function in it: amp.register_half_function(torch, 'einsum')."
            )
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"No function {name!r} in {where}. Pass the module that holds the function and its "
                "name there: amp.register_half_function(torch, 'einsum')."
            )
        entry = _Entry(module, name, kind)
        with self._lock:
            if self._sessions:
                self._applied += entry.replace()
            self._entries[id(module), name] = entry

    def kinds(self) -> dict[str, Kind]:
        """Returns the kind of every registered function by its name."""
        return {entry.name: entry.kind for entry in self._entries.values()}

    def apply(self) -> None:
        """Replaces every registered function not replaced yet; pairs with one ``undo``."""
        with self._lock:
            # First, so that a session that ends during this call is not the last one.
            self._sessions += 1
            added: list[_Replaced] = []
            try:
                for entry in list(self._entries.values()):
                    added += entry.replace()
                self._applied += added
            except BaseException:
                _restore_all(added)
                self.undo()
                raise

    def undo(self) -> None:
        """Ends one ``apply``; the last one restores every function."""
        with self._lock:
            if self._sessions == 0:
                raise RuntimeError("undo() of user functions was called without apply().")
            self._sessions -= 1
            if self._sessions == 0:
                _restore_all(self._applied)


def _restore_all(replaced: list[_Replaced]) -> None:
    while replaced:
        replaced.pop().restore()


@dataclass(frozen=True)
class _Entry:
    module: ModuleType | type
    name: str
    kind: Kind

    def replace(self) -> list[_Replaced]:
        """Sets the cast function in the module; returns nothing if it is already there."""
        own = vars(self.module).get(self.name, _ABSENT)
        function = getattr(self.module, self.name)
        if getattr(function, _MARK, None) == self.kind:
            return []
        value: Any = cast_function(function, self.kind)
        # A bound method read from a class is a class method; its replacement must not bind again.
        if inspect.isclass(self.module) and (
            inspect.ismethod(function) or isinstance(own, staticmethod)
        ):
            value = staticmethod(value)
        setattr(self.module, self.name, value)
        return [_Replaced(self, own, vars(self.module)[self.name])]


@dataclass(frozen=True)
class _Replaced:
    entry: _Entry
    before: Any
    ours: Any

    def restore(self) -> None:
        """Restores the attribute, unless other code has replaced ours.

        That code may still call ours, which then calls the original directly.
        """
        module, name = self.entry.module, self.entry.name
        if vars(module).get(name) is not self.ours:
            return
        if self.before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, self.before)


_ABSENT = object()


def _is_cast(fn: object) -> bool:
    return getattr(fn, _MARK, None) is not None


def _rule(kind: Kind, dtype: torch.dtype, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor]:
    """Returns the function that casts one tensor of a call with these arguments."""
    if kind == "float":
        return lambda tensor: tensor.float() if tensor.dtype in LOW_PRECISION else tensor
    if kind == "bfloat16":
        dtype = torch.bfloat16
    elif kind == "promote":
        dtype = _widest([*args, *kwargs.values()]) or dtype
    return lambda tensor: cast(tensor, dtype)


def _widest(values: list[Any]) -> torch.dtype | None:
    found = [tensor.dtype for tensor in tensors(values) if tensor.dtype in CASTABLE]
    return functools.reduce(torch.promote_types, found) if found else None
