"""Casts for user functions: decorated ones, and ones registered by module and name."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from types import ClassMethodDescriptorType, MethodType, ModuleType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from apex._core.arguments import positional_names
from apex._core.dtypes import CASTABLE, is_low_precision
from apex._core.op_casts import floating_dtypes, to_dtype, widest
from apex._core.tree import Call, map_tensors, tensors
from apex._engine.autocast.ambient import devices_on
from apex._engine.autocast.region import active_dtype, under
from apex._engine.autocast.weights import shared
from apex._engine.registry import live_specs
from apex._torch.dynamo import is_compiling

Kind = Literal["low_precision", "bfloat16", "float", "promote"]
"""How a user function's arguments are cast.

``low_precision``: every floating tensor to the region's dtype.
``bfloat16``: every floating tensor to bfloat16.
``float``: fp16 and bf16 tensors to fp32, with casts off inside; float64 stays.
``promote``: every floating tensor to the widest floating dtype among them.
"""

_log = logging.getLogger("apex")

P = ParamSpec("P")
R = TypeVar("R")

_ABSENT = object()


def cast_function(fn: Callable[P, R], kind: Kind) -> Callable[P, R]:
    """Returns ``fn`` with casts of its tensor arguments, however nested.

    With casts off, it calls ``fn`` directly. A bound method stays one, of the same object, so that
    a copy of the object calls its own. A method's ``self`` is cast only if it is a tensor.

    Works on functions, methods, ``autograd.Function.apply`` and custom operators, and under
    ``torch.compile``.

    Raises:
        TypeError: If ``fn`` is not callable.
    """
    if not callable(fn):
        raise TypeError(f"amp can cast callables only; got {type(fn).__name__} {fn!r}.")
    if inspect.ismethod(fn) and not inspect.isclass(fn.__self__):
        return MethodType(cast_function(fn.__func__, kind), fn.__self__)
    is_method = positional_names(fn)[:1] == ["self"]

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        dtype = active_dtype()
        if dtype is None:
            return fn(*args, **kwargs)
        call: Call = args, kwargs
        cast_args, cast_kwargs = map_tensors(_rule(kind, dtype, call), call)
        if is_method and args and not isinstance(args[0], Tensor):
            cast_args = args[0], *cast_args[1:]  # it writes to its object, not to a copy
        off = devices_on() if kind == "float" else ()
        return under(off, None, fn, cast_args, cast_kwargs)

    return wrapper


def _rule(kind: Kind, dtype: torch.dtype, call: Call) -> Callable[[Tensor], Tensor]:
    """Returns the cast of one tensor among the arguments of ``call``."""
    if kind == "float":
        return lambda tensor: tensor.float() if is_low_precision(tensor) else tensor
    target: torch.dtype | None = dtype
    if kind == "bfloat16":
        target = torch.bfloat16
    elif kind == "promote":
        target = widest(floating_dtypes(tensors(call)))

    def cast_tensor(tensor: Tensor) -> Tensor:
        if target is None or tensor.dtype is target or tensor.dtype not in CASTABLE:
            return tensor
        return to_dtype(tensor, target) if is_compiling() else shared.cast(tensor, target)

    return cast_tensor


_Function = tuple[Any, str, Kind]
"""A function to be cast: the module that holds it, its name there, and the kind of the casts."""


class UserRegistry:
    """Registered functions of other modules, replaced by cast versions while a session is alive."""

    def __init__(self) -> None:
        # Further functions that the next ``apply`` replaces.
        self._listed: list[_Function] = []
        # Reentrant, because a session may end in a garbage collection of the thread that holds it.
        self._lock = threading.RLock()
        self._registered: list[_Function] = []
        # By the module's id, as a namespace may have no hash. The values are the module, its own
        # attribute before the replacement, and the replacement.
        self._replaced: dict[tuple[int, str, Kind], tuple[Any, Any, Any]] = {}

    def register(self, module: ModuleType | type, name: str, kind: Kind) -> None:
        """Registers ``module.name`` to be cast while a session is alive.

        If the function is registered with several kinds, each one wraps the one before, as in apex.

        A class stays as it is: it is also used for more than calls, such as ``isinstance``.

        Raises:
            ValueError: If the module has no such function, or its functions cannot be replaced.
        """
        function = getattr(module, str(name), None)
        where = getattr(module, "__name__", repr(module))
        if not callable(function):
            raise ValueError(
                f"No function {name!r} in {where}. Pass the module that holds the function and its "
                "name there: amp.register_half_function(torch, 'einsum')."
            )
        if inspect.isclass(function):
            _log.warning(
                "amp: %s.%s is a class, so it is not replaced by a function that casts. To cast "
                "the arguments of its objects, register its method, such as 'forward' of a module.",
                where,
                name,
            )
            return
        with self._lock:
            try:
                self._replace(module, name, kind)
            except (AttributeError, TypeError) as error:
                raise ValueError(
                    f"{where}.{name} cannot be replaced ({error}). Wrap it where it is called: "
                    "function = amp.half_function(function)."
                ) from error
            self._registered.append((module, name, kind))
            self.undo()

    def list_only(self, functions: Iterable[_Function]) -> None:
        """Sets the further functions that the next ``apply`` replaces."""
        self._listed = [*functions]

    def apply(self) -> None:
        """Replaces the registered and listed functions, for a session that casts."""
        with self._lock:
            for function in (*self._registered, *self._listed):
                self._replace(*function)

    def undo(self) -> None:
        """Restores every function, once no session casts any more."""
        with self._lock:
            while self._replaced and not live_specs():
                (_, name, _), (module, before, ours) = self._replaced.popitem()
                if vars(module).get(name) is not ours:
                    continue  # other code has replaced ours since
                if before is _ABSENT:
                    delattr(module, name)
                else:
                    setattr(module, name, before)

    def _replace(self, module: Any, name: str, kind: Kind) -> None:
        key = id(module), name, kind
        if key in self._replaced:
            return
        before = vars(module).get(name, _ABSENT)
        setattr(module, name, _replacement(module, name, kind))
        self._replaced[key] = module, before, vars(module)[name]


def _unbound(method: ClassMethodDescriptorType) -> Callable[..., Any]:
    """Returns the function of a class method that is written in C; it takes the class first."""
    return lambda cls, *args, **kwargs: method.__get__(None, cls)(*args, **kwargs)


def _replacement(module: Any, name: str, kind: Kind) -> Any:
    """Returns what to set for a function; as a class attribute, it binds as the function does."""
    function = getattr(module, name)
    if not inspect.isclass(module):
        return cast_function(function, kind)
    attribute = inspect.getattr_static(module, name)
    if isinstance(attribute, ClassMethodDescriptorType):  # autograd.Function.apply of torch 2.15
        return classmethod(cast_function(_unbound(attribute), kind))
    if isinstance(attribute, classmethod):
        return classmethod(cast_function(attribute.__func__, kind))
    is_method = function is attribute and getattr(function, "__get__", None) is not None
    value = cast_function(function, kind)
    return value if is_method else staticmethod(value)
