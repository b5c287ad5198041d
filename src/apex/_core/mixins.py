"""Classes that put a mixin before another class, for objects that exist already.

Note [Instance layout]: Python lets an object change to a class only if both lay out instances
alike, and compares for this the class in each chain of ``__base__`` that brings ``__dict__``. With
two bases the chain goes through the first, the mixin, and ends where the own class's does, except
where the own class's first base has no ``__dict__``, as ``abc.ABC`` and ``typing.Generic[T]``:
there the own class is the only base, and a metaclass puts the mixin into the method resolution
order.

Note [Past the own class]: a method that calls its base by ``super(self.__class__, self)`` or
``super(type(self), self)`` finds itself in a subclass, without end. If the own class has such
methods, the metaclass puts the new class behind it, so that they find the base.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

MIXIN = "_apex_mixin"
"""Attribute of a generated class that holds its mixin."""

_FRONT = "_apex_front"
"""Attribute of a class behind its own class: the mixin with the further attributes."""


def with_mixin(
    mixin: type, own: type, names: dict[str, Any], *, despite_metaclass: bool = False
) -> Any:
    """Returns a new subclass of ``own`` whose methods are looked up in ``mixin`` first.

    It is named as ``own``, its last base, and has the further attributes ``names``. Objects of
    class ``own`` can change to it; see Note [Instance layout]. With ``despite_metaclass``, it is
    made even if the metaclass of ``own`` raises an error.
    """
    goes_past = _goes_past_its_class(own)
    names = {MIXIN: mixin, **names}
    if _layout(mixin) == _layout(own) and not goes_past:
        return new_class(own, (mixin, own), names, despite_metaclass=despite_metaclass)
    kind = type(own)
    metaclass = _MixinFirst if kind is type else type(kind.__name__, (_MixinFirst, kind), {})
    made = new_class(own, (own,), names, metaclass, despite_metaclass=despite_metaclass)
    if goes_past:  # only now: while it is made, the mixin keeps it out of registries
        # dynamo looks in the class itself for what it finds in the first one: an empty one.
        setattr(made, _FRONT, new_class(own, (new_class(own, (mixin,), names),), {}))
        for name in names.keys() - {MIXIN}:
            delattr(made, name)
        made.__bases__ = made.__bases__  # computes the order again
    return made


def known_with_mixin(mixin: type, own: type) -> Any:
    """Returns the class that :func:`with_mixin` has made before, if any.

    Python's weak list of subclasses serves as the cache.
    """
    subclasses: list[type] = type.__subclasses__(own)
    for known in subclasses:
        if mixin_of(known) is mixin and known.__bases__[-1] is own:
            return known
    return None


def mixin_of(kind: type) -> Any:
    """Returns the mixin of a class that :func:`with_mixin` made; ``None`` for others."""
    return vars(kind).get(MIXIN)


def new_class(
    base: Any,
    bases: tuple[type, ...],
    names: dict[str, Any],
    metaclass: type | None = None,
    *,
    despite_metaclass: bool = True,
) -> Any:
    """Returns a class with the given bases and attributes, under the name of ``base``."""
    shown = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    names = {**shown, **names}
    given = {} if metaclass is None else {"metaclass": metaclass}
    try:
        return types.new_class(base.__name__, bases, given, lambda scope: scope.update(names))
    except Exception:  # a metaclass that requires keywords or forbids subclasses
        if not despite_metaclass:
            raise
        return type.__new__(metaclass or type(base), base.__name__, bases, names)


class _MixinFirst(type):
    """Puts the mixin of a generated class before its only base."""

    def mro(cls) -> list[type]:
        order = super().mro()
        mixin = mixin_of(cls)
        if mixin is None:  # a class on top of a generated one
            return order
        front = vars(cls).get(_FRONT)
        first = [kind for kind in (front or mixin).__mro__ if kind not in order]
        if front is None:
            return [cls, *first, *order[1:]]
        return [*first, order[1], cls, *order[2:]]  # Note [Past the own class]


def _goes_past_its_class(own: type) -> bool:
    """Returns whether a method may call ``super`` with the class of its object."""
    kinds = [kind for kind in own.__mro__ if not kind.__module__.startswith(("torch.", "apex."))]
    methods = [each for kind in kinds for each in vars(kind).values() if inspect.isfunction(each)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    used = [set(code.co_names) for code in codes if code is not None]
    return any("super" in names and names & {"__class__", "type"} for names in used)


def _layout(kind: type) -> tuple[type | None, bool]:
    """Returns what Python compares when an object's class is set."""
    while kind.__base__ is not None and kind.__base__.__dictoffset__:
        kind = kind.__base__
    return kind.__base__, bool(kind.__weakrefoffset__)
