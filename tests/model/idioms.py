"""What real models do with their own class: each idiom is a class, and a use that says what it saw.

A use returns plain values; what it returns of a prepared model is what it returns of a plain one.
"""
# ruff: noqa: A002, PLW0642, RUF012 - as real models are written

import abc
import copy
import functools
import inspect
import pickle
import sys
import typing
from unittest import mock

import torch
from torch import nn

IDIOMS = {}
X = torch.linspace(-1, 1, 6).view(3, 2)


def idiom(use):
    """Registers a class with a use of its objects."""

    def registered(cls):
        IDIOMS[cls.__name__] = (cls, use)
        return cls

    return registered


def shape_of(model):
    return tuple(model(X).shape)


# -- overrides with signatures of their own -------------------------------------------------------


@idiom(lambda m: (m.to("cpu") is m, m.cpu() is m, m.stride.tolist()))
class OwnApply(nn.Linear):
    """As the base models of YOLOv5 and Ultralytics."""

    stride = None

    def _apply(self, fn):
        self = super()._apply(fn)
        self.stride = fn(torch.ones(1))
        return self


@idiom(lambda m: (m.zero_grad(verbose=True), m.zero_grad(False, True), m.said))
class WiderZeroGrad(nn.Linear):
    said = 0

    def zero_grad(self, set_to_none=True, verbose=False):
        super().zero_grad(set_to_none)
        self.said += verbose


if sys.version_info >= (3, 14):  # which evaluates no annotation before somebody asks

    @idiom(shape_of)
    class AnnotatedForCheckers(nn.Linear):
        def forward(self, batch: Batch) -> Batch:  # noqa: F821
            return super().forward(batch)


# -- super, and the class as a name ----------------------------------------------------------------


@idiom(lambda m: (m.scaled(2), m.both()))
class HelperThroughClass(nn.Linear):
    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def name(cls):
        return cls.__name__

    def scaled(self, x):
        return self.__class__.twice(x)

    def plain(self):
        return "plain"

    def both(self):
        return self.__class__.plain(self), self.__class__.name(), type(self).plain(self)


@idiom(lambda m: (m.twin().weight.shape, m.other().bias.shape, isinstance(m.twin(), type(m))))
class Rebuilds(nn.Linear, abc.ABC):
    def twin(self):
        return type(self)(self.in_features, self.out_features)

    def other(self):
        return self.__class__(self.in_features, self.out_features)


def derived_object(base):
    class Derived(base):
        def forward(self, x):
            return 0 * super().forward(x)

    return isinstance(Derived(2, 2), base), Derived(2, 2)(torch.ones(1, 2)).abs().tolist()


@idiom(
    lambda m: (
        (m.__class__ is Named, m.__class__.__name__, m.__class__.__mro__ == Named.__mro__),
        ({Named: 1}[type(m)], {type(m): 2}[Named], type(m) in ("", Named), {type(m)} == {Named}),
        (isinstance(m, Named), issubclass(type(m), Named), issubclass(Named, type(m))),
        issubclass(m.__class__, nn.Linear),
        (m._get_name(), repr(m), inspect.signature(type(m)), derived_object(type(m))),
    )
)
class Named(nn.Linear):
    pass


@idiom(lambda m: [patched(m, *call) for call in CALLS] + [vars(type(m)) == vars(PatchedByType)])
class PatchedByType(nn.Linear):
    """As profilers and tests wrap the methods of a class in place."""

    def forward(self, x):
        return super().forward(x) * 2

    def __deepcopy__(self, memo):
        return self.__class__(2, 2)


CALLS = [
    ("forward", lambda m: m(X)),
    ("zero_grad", lambda m: m.zero_grad()),
    ("_apply", lambda m: m.cpu()),
    ("parameters", lambda m: [*m.parameters()]),
    ("__deepcopy__", copy.deepcopy),
]


def patched(model, name, call):
    original, calls = getattr(type(model), name), []

    def wrapper(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    with mock.patch.object(type(model), name, wrapper):
        call(model)
    setattr(type(model), name, wrapper)
    call(model)
    setattr(type(model), name, original)
    call(model)
    return original is getattr(PatchedByType, name), calls


class Hooks(nn.Module):
    def hook(self):
        return "base"

    def other(self):
        return "base"


@idiom(
    lambda m: (
        (type(m).hook is Hooks.hook, type(m).other is Hooks.other),
        (m.__class__.other is Overrides.other, m.hook() + m.other(), m.hook.__self__ is m),
        m.hook.__code__ is Hooks.hook.__code__,  # as Lightning tells what a script overrides
    )
)
class Overrides(nn.Linear, Hooks):
    def other(self):
        return "own"


@idiom(lambda m: (m.change(), m.__class__ is Changed, shape_of(m), tuple(m.forward(X).shape)))
class ChangesClass(nn.Linear):
    def change(self):
        self.__class__ = Changed


class Changed(ChangesClass):
    def forward(self, x):
        return super().forward(x)[:1]


# -- how forward is there --------------------------------------------------------------------------


@idiom(lambda m: (shape_of(m), tuple(m.forward(X).shape)))
class ForwardIsAProperty(nn.Linear):
    @property
    def forward(self):
        return self.first if self.training else self.second

    def first(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def second(self, x):
        return self.first(x)


@idiom(lambda m: (shape_of(m), tuple(m.forward(X).shape)))
class ForwardInC(nn.Linear):
    forward = torch.sigmoid


@idiom(lambda m: (shape_of(m), tuple(m.forward(X).shape)))
class PartialForward(nn.Linear):
    def _run(self, x, *, scale):
        return nn.functional.linear(x, self.weight) * scale

    forward = functools.partialmethod(_run, scale=2)


@idiom(lambda m: (put_back(m), shape_of(m), [shape_of(c) for c in copies(m)]))
class PutBack(nn.Linear):
    """Its ``forward`` is replaced for a while and left on the object."""


def put_back(model):
    original = model.forward
    model.forward = lambda x: original(x)[:1]
    seen = shape_of(model)
    model.forward = original
    return seen


@idiom(lambda m: (m.depth(600), m.down(X, 300).shape))
class Recursive(nn.Linear):
    def depth(self, n):
        return 0 if n == 0 else 1 + self.depth(n - 1)

    def down(self, x, n):
        return self.down(x, n - 1) if n else x


@idiom(
    lambda m: (
        [inspect.iscoroutinefunction(each) for each in (m.a, type(m).a)],
        (inspect.isasyncgenfunction(m.b), inspect.isgeneratorfunction(m.c), list(m.c())),
        (m.d.tag, inspect.getsource(m.c), m.forward.__doc__),
        [str(inspect.signature(each)) for each in (m.d, m.forward)],
        inspect.getfullargspec(m.forward).args,  # as Lightning 1 and tape read it
    )
)
class Inspected(nn.Linear):
    async def a(self):
        return 1

    async def b(self):
        yield 1

    def c(self):
        yield 1

    def d(self, x, *, y=2):
        return x + y

    d.tag = "tagged"

    def forward(self, input, scale=1.0):
        """What it is."""
        return super().forward(input) * scale


# -- construction and registries -------------------------------------------------------------------


class RegisteredFirst(nn.Module):
    known = {}

    def __init_subclass__(cls, key, **kwargs):
        super().__init_subclass__(**kwargs)
        assert key not in RegisteredFirst.known
        RegisteredFirst.known[key] = cls


@idiom(lambda m: ([*RegisteredFirst.known], RegisteredFirst.known["a"] is m.__class__))
class InKeyedRegistry(RegisteredFirst, nn.Linear, key="a"):
    pass


class Meta(type):
    made = []

    def __new__(mcs, name, bases, scope, **kwargs):
        cls = super().__new__(mcs, name, bases, scope)
        mcs.made.append(name)
        return cls

    def __init__(cls, name, bases, scope, *, tag):
        super().__init__(name, bases, scope)
        cls.tag = tag


@idiom(lambda m: (Meta.made, m.tag, shape_of(m), type(m.__class__) is Meta))
class WithMetaclass(nn.Linear, metaclass=Meta, tag=1):
    pass


@idiom(lambda m: (m.extra, shape_of(m), hasattr(m, "none")))
class Slots(nn.Linear):
    __slots__ = ("extra",)

    def __init__(self, *args):
        super().__init__(*args)
        object.__setattr__(self, "extra", 3)


class Slotted(typing.Generic[typing.TypeVar("T")]):
    __slots__ = ()


@idiom(lambda m: (shape_of(m), m.__class__ is GenericFirst))
class GenericFirst(Slotted[int], nn.Linear):
    pass


# -- copies ----------------------------------------------------------------------------------------


def copies(model):
    return copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))


@idiom(lambda m: [(c.__class__ is CopiedByHand, shape_of(c)) for c in copies(m)])
class CopiedByHand(nn.Linear):
    def __deepcopy__(self, memo):
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new

    def __copy__(self):
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new


@idiom(copies)
class ReducedToText(nn.Linear):
    """Rebuilds what is no module, as a handle to a model elsewhere."""

    def __reduce__(self):
        return str, ("handle",)


@idiom(lambda model: copy_attributes(model))  # noqa: PLW0108 - defined below
class Attributes(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.names, self.nc = ["a"], 80


def copy_attributes(model):
    """As the moving averages of YOLOv5 and Ultralytics take over what a model says of itself."""
    average = Attributes(2, 2)
    for name, value in model.__dict__.items():
        if not name.startswith("_"):
            setattr(average, name, value)
    return sorted(k for k in average.__dict__), bool((average(X) == average.forward(X)).all())


@idiom(lambda m: (shape_of(m), m.zero_grad(), [n for n, _ in m.named_modules()], [*m.state_dict()]))
class OwnModules(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.linear = nn.Linear(*args)

    def forward(self, x):
        return self.linear(x)

    def named_modules(self, *args, **kwargs):
        yield from super().named_modules(*args, **kwargs)
