"""Several losses, optimizers, models and sessions."""

import random

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

levels = pytest.mark.parametrize("level", loops.LEVELS_SHORT)


class Gan:
    """Two nets with an optimizer each, and three losses: real, fake, generator."""

    def __init__(self, level):
        self.d, self.g = loops.net(1), nn.Linear(4, 4)
        self.opt_d, self.opt_g = loops.sgd(self.d.parameters()), loops.sgd(self.g.parameters())
        amp.initialize(
            [self.d, self.g], [self.opt_d, self.opt_g], opt_level=level, num_losses=3, verbosity=0,
            loss_scale="dynamic",
        )  # fmt: skip

    def step(self, overflow=None):
        """One training step; ``overflow`` is the loss whose input holds inf."""
        real, noise, fresh = (
            (loops.overflowing(seed) if index == overflow else loops.batch(seed))[0]
            for index, seed in enumerate((1, 2, 3))
        )
        self.opt_d.zero_grad()
        self.backward(self.d(real).float().square().mean(), self.opt_d, 0)
        self.backward((self.d(self.g(noise).detach()).float() - 1).square().mean(), self.opt_d, 1)
        self.opt_d.step()
        self.opt_g.zero_grad()
        self.backward(self.d(self.g(fresh)).float().square().mean(), self.opt_g, 2)
        self.opt_g.step()

    def backward(self, loss, optimizer, loss_id):
        # Small enough that fp16 holds its gradients times 2**16.
        loops.scaled_backward(loss / 64, optimizer, loss_id=loss_id)


@pytest.mark.parametrize("overflow", [0, 1, 2])
@levels
def test_an_overflow_in_one_loss_moves_only_its_scale_and_skips_its_optimizer(level, overflow):
    gan = Gan(level)
    optimizers = (gan.opt_d, gan.opt_g)
    before = list(map(loops.masters, optimizers))
    gan.step(overflow)
    expected = [2.0**16] * 3
    expected[overflow] = 2.0**15
    assert [loops.loss_scale(loss_id) for loss_id in range(3)] == expected
    same = [
        loops.same(old, loops.masters(new)) for old, new in zip(before, optimizers, strict=True)
    ]
    assert same == [overflow < 2, overflow == 2]


@pytest.mark.parametrize("same_loss_id", [True, False])
@levels
def test_blocks_inside_each_other_give_the_gradients_of_blocks_after_each_other(
    level, same_loss_id
):
    def gradients(nested):
        models = [loops.net(1), loops.net(2)]
        optimizers = [loops.sgd(model.parameters()) for model in models]
        # The scale grows with every pass, so the outer block ends at another one.
        amp.initialize(
            models, optimizers, opt_level=level, verbosity=0, num_losses=2, loss_scale="dynamic",
            growth_interval=1,
        )  # fmt: skip
        outer, inner = (
            amp.scale_loss(loops.loss_of(model, *loops.batch()) / 64, optimizer, loss_id=loss_id)
            for model, optimizer, loss_id in zip(
                models, optimizers, (0, 0 if same_loss_id else 1), strict=True
            )
        )
        if nested:
            with outer as outer_loss:
                with inner as inner_loss:
                    inner_loss.backward()
                outer_loss.backward()
        else:
            for block in (outer, inner):
                with block as scaled_loss:
                    scaled_loss.backward()
        return [loops.grads(amp.master_params(optimizer)) for optimizer in optimizers]

    assert loops.same(gradients(nested=True), gradients(nested=False))


@levels
def test_a_second_backward_after_a_step_inside_the_block_works(level):
    model, optimizer = loops.prepared(level, loss_scale="dynamic")
    head = torch.zeros((), requires_grad=True)
    with amp.scale_loss(loops.loss_of(model, *loops.batch()) + head, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True, inputs=list(model.parameters()))
        optimizer.step()
        scaled_loss.backward(inputs=[head])
    assert head.grad == 2.0**16


# -- passes of any loss and optimizers add up ------------------------------------------------

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
        self.model, self.owned, self.masters = Weights(), owned, level in loops.WITH_MASTERS
        self.optimizers = {
            name: loops.sgd([getattr(self.model, weight) for weight in weights], lr=0.0)
            for name, weights in owned.items()
        }
        amp.initialize(
            self.model, list(self.optimizers.values()), opt_level=level, num_losses=2, verbosity=0,
            loss_scale="dynamic", **options,
        )  # fmt: skip
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


@levels
def test_a_pass_of_more_optimizers_unscales_what_one_was_left_with(level):
    training = Training(level, OWN)
    training.block(["two", "one"], {"a": 3.0, "b": 1.0, "c": 2.0})
    training.block(["two"], {"b": 2.0, "c": 2.0}, delay=True)
    training.block(["one", "two"], {"a": 3.0, "b": 3.0, "c": 3.0})


@levels
def test_an_optimizer_that_shares_a_weight_knows_that_its_gradient_is_scaled(level):
    training = Training(level, OWN)
    training.block(["two"], {"b": 2.0, "c": 2.0}, delay=True)
    training.step("one")
    training.step("two")


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.parametrize("seed", range(4))
@levels
def test_passes_of_any_loss_and_optimizers_add_up(level, seed):
    for each in range(5):
        choose = random.Random(5 * seed + each)
        training = Training(level, ALONE, growth_interval=choose.choice([2, 3, 2000]))
        for _ in range(choose.randint(3, 9)):
            act(training, choose)
        for name in choose.sample(["one", "two"], 2):
            training.step(name)


def act(training, choose):
    """Does one thing of a random program."""
    what = choose.choice(["block"] * 5 + ["step", "step", "clear"])
    if what == "step":
        training.step(choose.choice(["one", "two"]))
    elif what == "clear":
        name = choose.choice(["one", "two", "model"])
        training.clear(name, set_to_none=choose.random() < 0.5)
    else:
        names = choose.choice([["one"], ["two"], ["one", "two"], ["two", "one"]])
        weights = sorted({weight for name in names for weight in ALONE[name]})
        reached = choose.sample(weights, choose.randint(1, len(weights)))
        factors = {weight: float(choose.randint(1, 3)) for weight in reached}
        options = {"delay": choose.random() < 0.5, "loss_id": choose.randint(0, 1)}
        clear = choose.choice([None, None, None, "one", "two", "model"])
        training.block(names, factors, clear=clear, **options)


# -- several sessions ------------------------------------------------------------------------


def chained(level, calls, **options):
    """Two nets in a row, prepared by one ``initialize`` call or by one each."""
    nets = [nn.Linear(4, 4), loops.net(1)]
    torch.manual_seed(0)
    for param in nets[0].parameters():
        nn.init.normal_(param, std=0.5)
    optimizers = [loops.sgd(net.parameters()) for net in nets]
    for given in [(nets, optimizers)] if calls == 1 else zip(nets, optimizers, strict=True):
        amp.initialize(*given, opt_level=level, verbosity=0, **options)
    return nets, optimizers


def joint_step(nets, optimizers, x, y, **options):
    loss = loops.loss_of(nn.Sequential(*nets), x, y) / 64
    loops.scaled_backward(loss, optimizers, **options)


@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@levels
def test_optimizers_of_several_calls_train_as_those_of_one(level, scale):
    trained = []
    for calls in (1, 2):
        nets, optimizers = chained(level, calls, loss_scale=scale)
        for step in range(4):
            make = loops.overflowing if step == 1 and scale == "dynamic" else loops.batch
            joint_step(nets, optimizers, *loops.batch(10 + step), delay_unscale=True)
            joint_step(nets, optimizers, *make(step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained.append([*map(loops.masters, optimizers), loops.loss_scale()])
        del nets, optimizers
    assert loops.same(*trained)
    assert trained[0][2] == (2.0**15 if scale == "dynamic" else 128.0)


@levels
def test_blocks_of_one_and_of_several_sessions_mix(level):
    """The older optimizer's own passes keep their own scale."""
    nets, optimizers = chained(level, 2, loss_scale="dynamic")
    plain, _ = chained("O0", 1)
    joint_step(nets, optimizers, *loops.batch(1))
    loss = nets[0](loops.batch(2)[0]).float().square().mean()
    loops.scaled_backward(loss, optimizers[0])
    (loops.loss_of(nn.Sequential(*plain), *loops.batch(1)) / 64).backward()
    plain[0](loops.batch(2)[0]).square().mean().backward()
    for optimizer, net in zip(optimizers, plain, strict=True):
        for param, expected in zip(amp.master_params(optimizer), net.parameters(), strict=True):
            torch.testing.assert_close(param.grad.float(), expected.grad, rtol=0.1, atol=1e-2)


def test_the_newest_session_of_the_optimizers_scales():
    optimizers = [loops.prepared("O2", loss_scale=scale)[1] for scale in (8.0, 4.0, 2.0)]
    for which, factor in (((0,), 8.0), ((0, 1), 4.0), ((1, 0), 4.0), ((0, 2, 1), 2.0)):
        loss = torch.ones((), requires_grad=True)
        with amp.scale_loss(loss, [optimizers[i] for i in which]) as scaled_loss:
            assert scaled_loss == factor


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("clears", ["other", "model"])
@pytest.mark.parametrize("delayed", [False, True])
def test_what_is_cleared_inside_a_block_is_cleared(level, clears, delayed):
    """Two optimizers share the weights; what either clears is gone for both."""
    model = loops.net()
    pair = [loops.sgd(model.parameters()) for _ in range(2)]
    model, pair = amp.initialize(model, pair, opt_level=level, verbosity=0, loss_scale=8.0)
    twin, one = loops.prepared(level, loss_scale=8.0)
    first, second = loops.batches(2)
    loops.backward(model, pair[0], *first, delay_unscale=delayed)
    with amp.scale_loss(loops.loss_of(model, *second), pair[0]) as scaled_loss:
        (pair[1] if clears == "other" else model).zero_grad()
        scaled_loss.backward()
    loops.backward(twin, one, *second)
    pair[0].step()
    one.step()
    assert loops.same(loops.masters(pair[0]), loops.masters(one))
