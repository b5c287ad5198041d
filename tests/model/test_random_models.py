"""Random programs of one model: what its owner does with it, at every level, against plain fp32.

Beside the prepared model goes a plain one. A level computes, bit by bit, what that one
computes if it is converted by hand. ``STRESS=1`` runs many more programs.
"""

import abc
import copy
import os
import pickle
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from apex import amp
from apex._torch.dispatcher import weight_cache_is_safe
from tests.model.test_data_parallel import replicate
from tests.support.features import has_masters
from tests.support.loops import WITH_MASTERS, saved_and_loaded, scaled_backward

SEEDS = range(1500 if os.environ.get("STRESS") else 40)
RATE = 2.0**-6
LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
CASTS = {"O1": torch.float16, "O4": torch.bfloat16}
LEVELS = [level for level in ("O0", *CASTS, *LOW) if has_masters or level not in WITH_MASTERS]


class Base(nn.Module):
    def __init__(self, choose):
        super().__init__()
        layers = [nn.Linear(3, 3) for _ in range(choose.randint(1, 3))]
        if choose.random() < 0.3:
            layers.append(layers[0])  # tied
        if choose.random() < 0.3:
            layers[-1] = nn.Sequential(layers[-1], nn.ReLU())
        self.layers = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=choose.random() < 0.7)
        self.register_buffer("shift", torch.zeros(3), persistent=choose.random() < 0.7)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.encode(x) * self.scale.to(x.dtype)

    def encode(self, x):
        return self.layers(x) + self.shift


class Stride:
    stride = None

    def _apply(self, fn):
        super()._apply(fn)
        self.stride = fn(torch.ones(1))
        return self


class ZeroGrad:
    def zero_grad(self):
        for _, param in self.named_parameters():
            param.grad = None


class SuperTrain:
    def train(self, mode=True):
        return super(SuperTrain, self.__class__).train(self, mode)


class Groups:
    def parameters(self):
        return [{"params": [param]} for _, param in self.named_parameters()]

    def zero_grad(self, set_to_none=True):
        for _, param in self.named_parameters():
            param.grad = None


class Abstract(abc.ABC):  # noqa: B024
    known = []  # noqa: RUF012

    def __init_subclass__(cls):
        Abstract.known.append(cls)


class Property:
    @property
    def forward(self):
        return super().forward


class Caller:
    def __call__(self, *args):
        return super().__call__(*args)

    def __getattr__(self, name):
        return super().__getattr__(name)


MIXINS = (Stride, ZeroGrad, SuperTrain, Groups, Abstract, Property, Caller)


class Program:
    """A prepared model, and the plain one with its exact values."""

    def __init__(self, seed):
        self.choose = random.Random(seed)
        torch.manual_seed(seed)
        mixins = self.choose.sample(MIXINS, self.choose.randint(0, 3))
        if Abstract in mixins:  # first, where it has the layout
            mixins.sort(key=lambda mixin: mixin is not Abstract)
        self.cls = type("Model", (*mixins, Base), {})
        globals()["Model"] = self.cls  # where pickle finds it
        self.cls.__module__ = __name__
        self.known = [*Abstract.known]
        self.plain = self.cls(self.choose)
        self.model = copy.deepcopy(self.plain)
        self.level = self.optimizer = None
        self.prepare()

    def prepare(self):
        self.level = self.choose.choice(LEVELS)
        named = self.model.named_parameters()
        trained = [param for _, param in named if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=RATE)
        options = {"opt_level": self.level, "loss_scale": 1.0, "verbosity": 0}
        amp.initialize(self.model, self.optimizer, **options)
        self.round_without_masters()

    def round_without_masters(self):
        """Rounds what has no master, as the level does."""
        for _, param in self.plain.named_parameters():
            if self.level in LOW and (self.level == "O3" or not param.requires_grad):
                param.data = param.data.to(LOW[self.level]).float()

    def by_hand(self, use):
        """Computes as the level does, with the plain model; returns its gradients, too."""
        dtype = LOW.get(self.level, torch.float32)
        model = copy.deepcopy(self.plain).to(dtype)
        x = torch.randint(-4, 4, (2, 3)) / 3
        casts = nullcontext()
        if self.level in CASTS:
            casts = torch.autocast("cpu", CASTS[self.level], cache_enabled=weight_cache_is_safe)
        with casts:
            output = use(model, x.to(dtype))
        return x, model, output

    # -- what a program does -------------------------------------------------------------------

    def call(self):
        use = self.choose.choice([lambda m, x: m(x), lambda m, x: m.forward(x)])
        x, _, expected = self.by_hand(use)
        assert torch.equal(use(self.model, x).float(), expected.float())

    def call_method(self):
        x, _, expected = self.by_hand(lambda model, x: model.encode(x))
        given = x.to(LOW.get(self.level, x.dtype))
        assert torch.equal(self.model.encode(given), expected)

    def step(self):
        if self.level == "O3":
            return  # trains its rounded weights
        x, hand, output = self.by_hand(lambda model, x: model(x))
        output.float().sum().backward()
        self.model.zero_grad()
        scaled_backward(self.model(x).float().sum(), self.optimizer)
        self.optimizer.step()
        pairs = zip(self.plain.named_parameters(), hand.named_parameters(), strict=True)
        with torch.no_grad():
            for (_, exact), (_, low) in pairs:
                if low.grad is not None:
                    exact.add_(low.grad.float(), alpha=-RATE)

    def load(self):
        part = self.choose.choice(["", "layers", "layers.0"])
        values = self.plain.get_submodule(part).state_dict()
        values = {name: torch.randn_like(value) for name, value in values.items()}
        for model in (self.model, self.plain):
            model.get_submodule(part).load_state_dict(copy.deepcopy(values))
        self.round_without_masters()

    def init(self):
        value = self.choose.randint(-120, 120) / 64  # which 16 bits hold
        dtype = LOW.get(self.level, torch.float32)
        for part in [name for name, _ in self.plain.named_parameters()][:2]:
            exact = self.plain.get_parameter(part)
            nn.init.constant_(self.model.get_parameter(part), value)
            # Masters follow weights in the elements that differ from the rounded master.
            exact.data = torch.where(exact.data.to(dtype) == value, exact.data, value)
        self.round_without_masters()

    def write_masters(self):
        masters = [*amp.master_params(self.optimizer)]
        own = [param for _, param in self.plain.named_parameters() if param.requires_grad]
        if self.level == "O3":
            return
        for master, param in zip(masters, own, strict=True):
            value = torch.randn_like(param)
            master.data.copy_(value)
            param.data.copy_(value)
        self.call()  # after a write to both, the master would win

    def move(self):
        mode = self.choose.random() < 0.5
        for model in (self.model, self.plain):
            model.train(mode)
            model.zero_grad()
            model.to("cpu")
            model.cpu()

    def save(self, model=None):
        expected = self.plain.state_dict()
        found = (model or self.model).state_dict()
        assert [*found] == [*expected]
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    def duplicate(self):
        copies = [copy.copy, copy.deepcopy, saved_and_loaded]
        copies.append(lambda model: pickle.loads(pickle.dumps(model)))
        twin = self.choose.choice(copies)(self.model)
        assert type(twin) is self.cls
        assert {param.dtype for _, param in twin.named_parameters()} == {torch.float32}
        self.save(twin)

    def replicate(self):
        use = lambda model, x: model(x)  # noqa: E731
        x, _, expected = self.by_hand(use)
        twin = replicate(self.model)
        assert twin.__class__ is self.cls
        assert torch.equal(twin(x).float(), expected.float())

    def reinitialize(self):
        amp.restore(self.model, self.optimizer)
        assert type(self.model) is self.cls
        x = torch.ones(1, 3)
        if self.level != "O3":
            assert torch.equal(self.model(x), self.plain(x))
        self.plain.load_state_dict(self.model.state_dict(), strict=False)
        self.prepare()

    ACTIONS = (
        *(call, call, call_method, step, step, load, init, write_masters),
        *(move, save, save, duplicate, duplicate, replicate, reinitialize),
    )

    def run(self):
        for _ in range(12):
            self.choose.choice(self.ACTIONS)(self)
            assert self.model.__class__ is self.cls
            assert Abstract.known == self.known


@pytest.mark.parametrize("chunk", range(10))
def test_a_prepared_model_does_what_a_model_converted_by_hand_does(chunk):
    for seed in SEEDS[chunk::10]:
        program = Program(seed)
        program.run()
