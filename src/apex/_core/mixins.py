"""Classes generated for objects that exist already, which stay objects of their own class.

Note [Generated class]
    A generated class puts our methods before the methods of an object's own class, so that they run
    with the right object in copies, replicas and threads. Other code does not notice. The object
    reports its own class as ``__class__``, so ``super(self.__class__, self)`` works, and a script
    can set another class. Calls, reads and writes on ``type(self)`` reach the own class, so that a
    method patched there calls the class's own method, and not ours.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from apex._torch.dynamo import is_tracing

MIXIN = "_apex_mixin"
"""Attribute of a generated class that holds the class of its methods."""

_SHOWN = ("__bases__", "__mro__", "__copy__", "__signature__", "__subclasses__")
"""Attributes that dynamo outside of traces, ``functools.singledispatch``, ``copy.copy``,
``inspect.signature`` and walks through all subclasses read."""


class _Generated(type):
    """The metaclass of generated classes, with the metaclass of the own class as another base."""

    def mro(cls) -> list[type]:
        """Puts the mixin before the own class, without making it a base.

        Python lets an object change to a class of the same layout only, which the single base
        ensures. The mixin hides generated classes from registries in ``__init_subclass__``.
        """
        first, *rest = super().mro()
        mixin = mixin_of(cls)
        added = [base for base in mixin.__mro__ if base not in rest]
        return [first, *added, *rest]

    def __new__(cls, name: str, bases: tuple[type, ...], *args: Any, **kwargs: Any) -> Any:
        """Makes a class that a script derives from a generated one derive from the own class."""
        own_bases = tuple(map(plain_class, bases))
        metaclass, _, _ = types.prepare_class(name, own_bases)
        return metaclass(name, own_bases, *args, **kwargs)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the own class."""
        return plain_class(cls)(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the own class."""
        return inspect.signature(plain_class(cls))

    def __instancecheck__(cls, instance: object) -> bool:
        """Returns whether an object is one of the own class."""
        # Not isinstance: an abstract class asks its subclasses, among them this one, without end.
        return type.__instancecheck__(plain_class(cls), instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Returns whether a class is the own class, or derived from it."""
        return type.__subclasscheck__(plain_class(cls), subclass)

    def __eq__(cls, other: object) -> bool:
        """Returns whether both have the same own class, which tables by class hold.

        Dynamo searches the MRO for an own class by ``==``, and must not find the generated one.
        """
        if is_tracing() or not isinstance(other, type):
            return cls is other
        return plain_class(cls) is plain_class(other)

    def __hash__(cls) -> int:
        """Returns the hash of the own class."""
        return type.__hash__(plain_class(cls))

    def __getattribute__(cls, name: str) -> Any:
        """Reads the own class's attribute, except names in ``_SHOWN``, and except in dynamo."""
        if name in _SHOWN or is_tracing():
            return super().__getattribute__(name)
        return getattr(plain_class(cls), name)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Sets an attribute of the own class."""
        type.__setattr__(plain_class(cls), name, value)

    def __delattr__(cls, name: str) -> None:
        """Deletes an attribute of the own class."""
        type.__delattr__(plain_class(cls), name)


def with_mixin(mixin: Any, own: type) -> Any:
    """Returns the generated class of ``own`` with the methods of ``mixin``, always the same one.

    A mixin may define ``_apex_overrides(own)``, which returns attributes that depend on ``own``.
    """
    # Python's weak list of subclasses serves as the cache.
    known: type
    for known in type.__subclasses__(own):
        methods = mixin_of(known)
        if methods is not None and methods.__base__ is mixin:
            return known

    def shown_class(self: object) -> type:
        # Dynamo searches this class for methods.
        return type(self) if is_tracing() else own

    def change_class(self: object, new: type) -> None:
        swap_class(self, with_mixin(mixin, plain_class(new)))

    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    overrides: dict[str, Any] = {}
    make_overrides = getattr(mixin, "_apex_overrides", None)
    if make_overrides is not None:
        overrides = make_overrides(own)
    # A class that hides nothing, as dynamo's guards look for methods in its ``__dict__``.
    names[MIXIN] = type(mixin.__name__, (mixin,), overrides)
    names["__class__"] = property(shown_class, change_class)
    # Python requires a metaclass derived from the base's.
    metaclass = type("_Generated", (_Generated, type(own)), {})
    # Past the own metaclass's ``__new__``, which may register classes or require keywords.
    return type.__new__(metaclass, own.__name__, (own,), names)


def mixin_of(cls: type) -> Any:
    """Returns the class of a generated class's methods; ``None`` for other classes."""
    return type.__getattribute__(cls, "__dict__").get(MIXIN)


def plain_class(cls: type) -> Any:
    """Returns the own class of which ``cls`` is the generated one, or ``cls`` itself."""
    return cls if mixin_of(cls) is None else cls.__bases__[0]


def swap_class(obj: object, new: type) -> None:
    """Sets the class of ``obj``, past its own ``__setattr__`` and a property ``__class__``."""
    vars(object)["__class__"].__set__(obj, new)
