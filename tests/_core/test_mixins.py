"""Classes that put a mixin before another class."""

import abc
import collections.abc
import typing

import pytest

from apex._core.mixins import known_with_mixin, mixin_of, with_mixin

T = typing.TypeVar("T")


class Root:
    def name(self):
        return ["root"]


class Mixin(Root):
    def __init_subclass__(cls):
        """Keeps subclasses out of registries."""

    def name(self):
        return ["mixin", *super().name()]


class Slotted:
    __slots__ = ()


class Meta(type):
    pass


class Plain(Root):
    def name(self):
        return ["own", *super().name()]


class Abstract(abc.ABC, Root):
    name = Plain.name


class Generic(typing.Generic[T], Root):
    name = Plain.name


class Sized(collections.abc.Sized, Root):
    name = Plain.name

    def __len__(self):
        return 0


class WithSlots(Slotted, Root):
    name = Plain.name


class WithMeta(Slotted, Root, metaclass=Meta):
    name = Plain.name


class Beside(collections.abc.Hashable, Plain):
    def __hash__(self):
        return 1


class PastItsClass(Root):
    def name(self):
        return ["own", *super(self.__class__, self).name()]


class PastItsType(abc.ABC, Root):
    def name(self):
        return ["own", *super(type(self), self).name()]


class Registry(Root):
    seen = ()

    def __init_subclass__(cls):
        Registry.seen = (*Registry.seen, cls.__name__)


class Registered(Registry):
    def name(self):
        return ["own", *super(type(self), self).name()]


for own in (Abstract, Generic, Sized, WithSlots, WithMeta):

    def name(self, own=own):
        return ["own", *super(own, self).name()]

    own.name = name

every_class = pytest.mark.parametrize(
    "own",
    [
        *(Plain, Abstract, Generic, Sized, WithSlots, WithMeta, Beside),
        *(PastItsClass, PastItsType, Registered),
    ],
)


@every_class
def test_an_object_changes_to_the_new_class_and_back(own):
    made = with_mixin(Mixin, own, {"more": 3})
    given = own()
    given.__class__ = made
    assert given.name() == ["mixin", "own", "root"]
    assert given.more == 3
    assert isinstance(given, own)
    assert isinstance(given, Mixin)
    assert (made.__name__, made.__module__) == (own.__name__, own.__module__)
    assert made.__bases__[-1] is own
    given.__class__ = own
    assert given.name() == ["own", "root"]


@every_class
def test_the_new_class_is_found_again(own):
    made = known_with_mixin(Mixin, own) or with_mixin(Mixin, own, {})
    assert known_with_mixin(Mixin, own) is made
    assert mixin_of(made) is Mixin
    assert mixin_of(own) is None
    assert known_with_mixin(Root, own) is None


@every_class
def test_a_class_on_top_keeps_the_order(own):
    made = with_mixin(Mixin, own, {})

    class Top(made):
        pass

    assert mixin_of(Top) is None
    assert Top.__mro__[1:] == made.__mro__


def test_a_class_behind_its_own_is_in_no_registry():
    with_mixin(Mixin, Registered, {})
    assert Registry.seen == ("Registered",)
