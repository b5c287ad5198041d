"""Classes generated for objects that exist already, under the name of their own class."""

from __future__ import annotations

import types
from typing import Any

MIXIN = "_apex_mixin"
"""Attribute of a generated class that holds its mixin."""


def with_mixin(mixin: type, own: type) -> Any:
    """Returns the subclass of ``own`` whose methods are looked up in ``mixin`` first, always one.

    Its last base is ``own``, and so is its objects' ``self.__class__``: as in Horovod, methods may
    call ``super(self.__class__, self)``.
    """
    if (known := known_with_mixin(mixin, own)) is not None:
        return known
    seen = property(lambda self: own, vars(object)["__class__"].__set__)
    return new_class(own, (mixin, own), {MIXIN: mixin, "__class__": seen})


def new_class(own: type, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
    """Returns a class with the given bases and attributes, under the name of ``own``."""
    shown = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    names = {**shown, **names}
    try:
        return types.new_class(own.__name__, bases, {}, lambda scope: scope.update(names))
    except Exception:  # noqa: BLE001 - a metaclass that requires keywords or forbids subclasses
        return type.__new__(type(own), own.__name__, bases, names)


def known_with_mixin(mixin: type, own: type) -> Any:
    """Returns the class that was generated for ``own`` and ``mixin`` before, or ``None``.

    Python's weak list of subclasses serves as the cache.
    """
    subclasses: list[type] = type.__subclasses__(own)
    found = (each for each in subclasses if each.__bases__[-1] is own and mixin_of(each) is mixin)
    return next(found, None)


def mixin_of(kind: type) -> Any:
    """Returns the mixin of a generated class; ``None`` for other classes."""
    return vars(kind).get(MIXIN)


def plain_class(kind: type) -> type:
    """Returns ``kind`` without the classes that were generated for it.

    A class on top of a generated one, such as ``fully_shard`` makes, is rebuilt over the plain one.
    """
    if mixin_of(kind) is not None:
        return kind.__bases__[-1]
    if all(mixin_of(each) is None for each in kind.__mro__):
        return kind
    names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    rebuilt: type = new_class(kind, tuple(map(plain_class, kind.__bases__)), names)
    return rebuilt


def swap_class(obj: object, new: type) -> None:
    """Sets the class of ``obj``, past its own ``__setattr__`` and a property ``__class__``."""
    vars(object)["__class__"].__set__(obj, new)
