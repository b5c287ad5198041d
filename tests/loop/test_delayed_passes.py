"""Passes with ``delay_unscale``, of any loss and optimizers, add up as those of plain torch."""

import random

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases

LEVELS = ("O0", "O2", "O5")
OWN = {"one": "ac", "two": "bc"}
"""The weights of each optimizer; both step ``c``."""

ALONE = {"one": "ac", "two": "b"}


class Weights(nn.Module):
    """Three weights; a loss is a sum of some of them, so gradients are its small factors."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, factors):
        return sum((getattr(self, name).float() * k).sum() for name, k in factors.items())


class Training:
    """Weights that no step moves, and the gradients that plain torch would give them."""

    def __init__(self, level, owned, **options):
        self.model, self.owned, self.masters = Weights(), owned, level in cases.WITH_MASTERS
        self.optimizers = {
            name: cases.sgd([getattr(self.model, weight) for weight in weights], lr=0.0)
            for name, weights in owned.items()
        }
        amp.initialize(
            self.model,
            list(self.optimizers.values()),
            opt_level=level,
            num_losses=2,
            loss_scale="dynamic",
            verbosity=0,
            **options,
        )
        for scaler, scale in zip(amp._amp_state.loss_scalers, (2.0**10, 2.0**4), strict=True):
            scaler._loss_scale = scale
        self.expected = dict.fromkeys("abc", 0.0)

    def block(self, names, factors, loss_id=0, *, delay=False, clear=None):
        optimizers = [self.optimizers[name] for name in names]
        loss = self.model(factors)
        with amp.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay) as scaled_loss:
            if clear is not None:
                self.clear(clear)
            scaled_loss.backward()
        for weight, factor in factors.items():
            self.expected[weight] += factor
        if not delay:
            self.check(*names)

    def step(self, name):
        hook = self.optimizers[name].register_step_pre_hook(lambda *_: self.check(name))
        self.optimizers[name].step()
        hook.remove()
        if self.masters:
            others = [each for other, each in self.owned.items() if other != name]
            own = set(self.owned[name]).difference(*others)
            self.expected.update(dict.fromkeys(own, 0.0))

    def clear(self, name, *, set_to_none=True):
        cleared = self.model if name == "model" else self.optimizers[name]
        cleared.zero_grad(set_to_none=set_to_none)
        self.expected.update(dict.fromkeys(self.owned.get(name, "abc"), 0.0))

    def check(self, *names):
        for name in names:
            params = amp.master_params(self.optimizers[name])
            for weight, param in zip(self.owned[name], params, strict=True):
                got = torch.zeros(2) if param.grad is None else param.grad.float()
                assert torch.equal(got, torch.full((2,), self.expected[weight])), weight


@pytest.mark.parametrize("level", LEVELS)
def test_a_scale_that_grows_in_between_leaves_delayed_gradients_as_they_are(level):
    training = Training(level, ALONE, growth_interval=2)
    training.block(["one"], {"a": 3.0}, delay=True)
    for _ in range(2):
        training.block(["two"], {"b": 2.0})
    assert cases.loss_scale() == 2.0**11
    training.block(["one"], {"a": 3.0})


@pytest.mark.parametrize("level", LEVELS)
def test_a_pass_of_more_optimizers_unscales_what_one_was_left_with(level):
    training = Training(level, OWN)
    training.block(["two", "one"], {"a": 3.0, "b": 1.0, "c": 2.0})
    training.block(["two"], {"b": 2.0, "c": 2.0}, delay=True)
    training.block(["one", "two"], {"a": 3.0, "b": 3.0, "c": 3.0})


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_shares_a_weight_knows_that_its_gradient_is_scaled(level):
    training = Training(level, OWN)
    training.block(["two"], {"b": 2.0, "c": 2.0}, delay=True)
    training.step("one")
    training.step("two")


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_series_leaves_the_scale_s_tensors_in_place(level):
    """A CUDA graph of an iteration updates them."""
    training = Training(level, ALONE)
    scaler = amp._amp_state.loss_scalers[0]._scaler
    before = scaler.loss_scale
    for _ in range(2):
        training.block(["one", "two"], {"a": 1.0, "b": 1.0}, delay=True)
        training.block(["two", "one"], {"a": 1.0, "b": 1.0})
        training.block(["one"], {"a": 1.0}, delay=True)
        training.step("one")
    assert scaler.loss_scale is before


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(12))
def test_passes_of_any_loss_and_optimizers_add_up(level, seed):
    owned = ALONE
    choose = random.Random(seed)
    training = Training(level, owned, growth_interval=choose.choice([2, 3, 2000]))
    for _ in range(choose.randint(3, 9)):
        what = choose.choice(["block"] * 5 + ["step", "step", "clear"])
        if what == "step":
            training.step(choose.choice(["one", "two"]))
        elif what == "clear":
            name = choose.choice(["one", "two", "model"])
            training.clear(name, set_to_none=choose.random() < 0.5)
        else:
            names = choose.choice([["one"], ["two"], ["one", "two"], ["two", "one"]])
            weights = sorted({weight for name in names for weight in owned[name]})
            reached = choose.sample(weights, choose.randint(1, len(weights)))
            factors = {weight: float(choose.randint(1, 3)) for weight in reached}
            options = {"delay": choose.random() < 0.5, "loss_id": choose.randint(0, 1)}
            clear = choose.choice([None, None, None, "one", "two", "model"])
            training.block(names, factors, clear=clear, **options)
    for name in choose.sample(["one", "two"], 2):
        training.step(name)
