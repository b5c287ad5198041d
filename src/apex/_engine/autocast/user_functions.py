"""Functions that the user wants cast: decorators, and functions registered in other modules."""

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
from apex._core.tree import map_arguments
from apex._engine.autocast.region import UncastRegion, active_dtype

Kind = Literal["low_precision", "bfloat16", "float", "promote"]
"""What a user's function gets.

``low_precision``: every floating tensor in the region's dtype.
``bfloat16``: every floating tensor in bfloat16.
``float``: fp16 and bf16 tensors in fp32, and no casts inside; float64 stays.
``promote``: every floating tensor in the widest floating dtype among them.
"""

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "_apex_cast_kind"
_uncast = UncastRegion(users=True)


def cast_function(fn: Callable[P, R], kind: Kind) -> Callable[P, R]:
    """Returns ``fn`` behind casts of its tensor arguments, in any nesting.

    Where casts are off it is a plain call.

    Works on functions, methods, ``autograd.Function.apply`` and custom operators, and traces
    under ``torch.compile``. A function that is cast already is cast anew, never twice.

    Raises:
        ValueError: If ``kind`` is unknown.
        TypeError: If ``fn`` is not callable.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"Unknown kind of cast {kind!r}: use one of {', '.join(get_args(Kind))}.")
    if not callable(fn):
        raise TypeError(f"amp can only cast calls of functions; got {type(fn).__name__} {fn!r}.")
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
    """Functions of other modules that sessions cast; replaced while any session is applied.

    A session may end in another thread, and in a garbage collection anywhere inside ``apply``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._applied: list[_Replaced] = []
        self._sessions = 0

    def register(self, module: ModuleType | type, name: str, kind: Kind) -> None:
        """Marks ``module.name`` to be cast from the next ``apply`` on; the last kind holds.

        Raises:
            ValueError: If the module has no such function, or the kind is unknown.
        """
        where = getattr(module, "__name__", repr(module))
        if kind not in get_args(Kind):
            raise ValueError(
                f"Unknown kind of cast {kind!r}: use one of {', '.join(get_args(Kind))}."
            )
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"No such function {name!r} in {where}: amp registers a function by the module "
                "that holds it and its name there: amp.register_half_function(torch, 'einsum')."
            )
        self._entries[id(module), name] = _Entry(module, name, kind)

    def kinds(self) -> dict[str, Kind]:
        """Returns the kind of every registered function, by its name in its module."""
        return {entry.name: entry.kind for entry in self._entries.values()}

    def apply(self) -> None:
        """Replaces every registered function that is not replaced yet; pairs with one ``undo``."""
        with self._lock:
            # First: a session that ends in between must not be the last one.
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
        """Ends one ``apply``; the last one puts every function back."""
        with self._lock:
            if self._sessions == 0:
                raise RuntimeError("undo() of user functions without apply(): call apply() first.")
            self._sessions -= 1
            if self._sessions == 0:
                _restore_all(self._applied)


def _restore_all(replaced: list[_Replaced]) -> None:
    while replaced:
        replaced.pop().put_back()


@dataclass(frozen=True)
class _Entry:
    module: ModuleType | type
    name: str
    kind: Kind

    def replace(self) -> list[_Replaced]:
        """Sets the cast function in the module; empty where it stands there already."""
        own = vars(self.module).get(self.name, _ABSENT)
        function = getattr(self.module, self.name)
        if getattr(function, _MARK, None) == self.kind:
            return []
        value: Any = cast_function(function, self.kind)
        # A bound method read from a class is a class method: its replacement must not bind again.
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

    def put_back(self) -> None:
        """Restores the attribute.

        Unless someone has replaced ours by now; theirs may call ours, which is then a plain call.
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
    """Returns the cast of one tensor for a call with these arguments."""
    if kind == "float":
        return lambda tensor: tensor.float() if tensor.dtype in LOW_PRECISION else tensor
    if kind == "bfloat16":
        dtype = torch.bfloat16
    elif kind == "promote":
        dtype = _widest([*args, *kwargs.values()]) or dtype
    return lambda tensor: cast(tensor, dtype)


def _widest(values: list[Any]) -> torch.dtype | None:
    found: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype in CASTABLE:
            found.append(tensor.dtype)
        return tensor

    map_arguments(note, tuple(values), {})
    return functools.reduce(torch.promote_types, found) if found else None
