"""Proxies that stand for a module without being one, as classy_vision's models do, and twins."""

import torch
from torch import nn

from tests.training import cases


class Trunk(nn.Module):
    """Returns its features; whoever runs it computes the head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def features(self, x):
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x):
        return self.features(x)


class Whole(Trunk):
    """The same model as one module."""

    def forward(self, x):
        return self.head(self.features(x))


class Method:
    """A method of the module that returns the proxy where it would return the module."""

    def __init__(self, proxy, method):
        self.proxy, self.method = proxy, method

    def __call__(self, *args, **kwargs):
        result = self.method(*args, **kwargs)
        return self.proxy if result is self.proxy.inner else result


class Transparent:
    """Has nothing of its own but the call."""

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    @property
    def __class__(self):
        return self.inner.__class__

    def __getattr__(self, name):
        if name == "inner":  # asked while a copy is made, before it is there
            raise AttributeError(name)
        value = getattr(self.inner, name)
        return Method(self, value) if hasattr(value, "__self__") else value

    def __setattr__(self, name, value):
        if name in ("inner", "forward"):
            self.__dict__[name] = value
        else:
            setattr(self.inner, name, value)

    def __getstate__(self):  # before Python 3.11 copies would ask the module for its own
        return self.__dict__

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class Heading(Transparent):
    """Computes the head after the module."""

    def forward(self, x):
        return self.inner.head(self.inner(x))


class Slotted:
    """Has no ``__dict__``, cannot be referred to weakly, and refuses another class."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        object.__setattr__(self, "inner", inner)

    @property
    def __class__(self):
        return self.inner.__class__

    @__class__.setter
    def __class__(self, value):
        raise TypeError("this object keeps its class")

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        return Method(self, value) if hasattr(value, "__self__") else value

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    def __reduce__(self):
        return Slotted, (self.inner,)

    def forward(self, x):
        return self.inner.head(self.inner(x))

    def __call__(self, x):
        return self.forward(x)


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


# Each proxy, and the module that computes the same.
KINDS = {
    "with a forward": lambda: Heading(seeded(Trunk)),
    "without one": lambda: Transparent(seeded(Whole)),
    "of slots": lambda: Slotted(seeded(Trunk)),
    "of a proxy": lambda: Transparent(Heading(seeded(Trunk))),
}


def whole():
    return seeded(Whole)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def prepared(model, level, make_optimizer=momentum, **options):
    return cases.prepared(level, make_optimizer, model, **options)
