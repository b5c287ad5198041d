"""Several losses, optimizers and models in one session."""

import pytest
import torch

from apex import amp
from tests.support import training as cases


class Gan:
    """Two nets with an optimizer each, and three losses: real, fake, generator."""

    def __init__(self, level):
        self.d, self.g = cases.net(1), torch.nn.Linear(4, 4)
        self.opt_d, self.opt_g = cases.sgd(self.d.parameters()), cases.sgd(self.g.parameters())
        amp.initialize(
            [self.d, self.g],
            [self.opt_d, self.opt_g],
            opt_level=level,
            num_losses=3,
            verbosity=0,
            loss_scale="dynamic",
        )

    def step(self, overflow=None):
        """One training step; ``overflow`` is the loss whose input holds inf."""
        real, noise, fresh = (
            (cases.overflowing(seed) if index == overflow else cases.batch(seed))[0]
            for index, seed in enumerate((1, 2, 3))
        )
        self.opt_d.zero_grad()
        self._backward(self.d(real).float().square().mean(), self.opt_d, 0)
        self._backward((self.d(self.g(noise).detach()).float() - 1).square().mean(), self.opt_d, 1)
        self.opt_d.step()
        self.opt_g.zero_grad()
        self._backward(self.d(self.g(fresh)).float().square().mean(), self.opt_g, 2)
        self.opt_g.step()

    def _backward(self, loss, optimizer, loss_id):
        # Small enough that fp16 holds its gradients times 2**16.
        with amp.scale_loss(loss / 64, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()

    def values(self):
        return [cases.masters(self.opt_d), cases.masters(self.opt_g)]


@pytest.mark.parametrize("overflow", [0, 1, 2])
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_overflow_in_one_loss_moves_only_its_scale(level, overflow):
    gan = Gan(level)
    gan.step(overflow)
    expected = [2.0**16] * 3
    expected[overflow] = 2.0**15
    assert [cases.loss_scale(loss_id) for loss_id in range(3)] == expected


@pytest.mark.parametrize("level", cases.MIXED)
def test_an_overflow_skips_every_optimizer_given_with_the_loss(level):
    first, second = cases.net(1), cases.net(2)
    optimizers = [cases.sgd(first.parameters()), cases.sgd(second.parameters())]
    amp.initialize([first, second], optimizers, opt_level=level, verbosity=0, loss_scale="dynamic")
    before = [cases.masters(optimizer) for optimizer in optimizers]
    x, y = cases.batch()
    loss = cases.loss_of(first, *cases.overflowing()) + cases.loss_of(second, x, y)
    with amp.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert cases.same(before, [cases.masters(optimizer) for optimizer in optimizers])


@pytest.mark.parametrize("level", cases.LEVELS)
def test_one_loss_for_two_optimizers_trains_like_one_optimizer_over_both_models(level):
    def trained(split):
        models = [cases.net(1), cases.net(2)]
        groups = [list(model.parameters()) for model in models]
        parts = groups if split else [[*groups[0], *groups[1]]]
        optimizers = [cases.OPTIMIZERS["Adam"](part) for part in parts]
        amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        for x, y in cases.batches(3):
            loss = cases.loss_of(models[0], x, y) + cases.loss_of(models[1], x, y)
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [cases.values(model.parameters()) for model in models]

    assert cases.same(trained(split=True), trained(split=False))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_two_optimizers_over_one_model_train_like_one_over_all_of_it(level):
    def trained(split):
        model = cases.net()
        first, last = list(model[0].parameters()), list(model[2].parameters())
        parts = [first, last] if split else [first + last]
        optimizers = [cases.OPTIMIZERS["Adam"](part) for part in parts]
        amp.initialize(model, optimizers, opt_level=level, verbosity=0)
        for x, y in cases.batches(3):
            cases.backward(model, optimizers, x, y)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return cases.values(model.parameters())

    assert cases.same(trained(split=True), trained(split=False))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_two_optimizers_over_the_same_parameters_both_train_them(level):
    model = cases.net()
    optimizers = [cases.sgd(model.parameters()), cases.sgd(model.parameters())]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    for optimizer in optimizers:
        before = cases.values(model.parameters())
        optimizer.zero_grad()
        cases.backward(model, optimizer, *cases.batch())
        optimizer.step()
        assert not cases.same(before, cases.values(model.parameters()))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_two_sessions_have_scales_of_their_own(level):
    first = cases.prepared(level, loss_scale="dynamic")
    second = cases.prepared(level, loss_scale="dynamic")
    cases.train_step(*first, *cases.overflowing())
    cases.train_step(*second, *cases.batch())
    states = list(amp.state_dict().values())[-2:]
    assert [state["loss_scale"] for state in states] == [2.0**15, 2.0**16]


@pytest.mark.parametrize("same_loss_id", [True, False])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_blocks_inside_each_other_give_the_gradients_of_blocks_after_each_other(
    level, same_loss_id
):
    x, y = cases.batch()

    def gradients(nested):
        models = [cases.net(1), cases.net(2)]
        optimizers = [cases.sgd(model.parameters()) for model in models]
        # The scale grows with every pass, so the outer block ends at another one.
        amp.initialize(
            models,
            optimizers,
            opt_level=level,
            verbosity=0,
            num_losses=2,
            loss_scale="dynamic",
            growth_interval=1,
        )
        outer, inner = (
            amp.scale_loss(cases.loss_of(model, x, y) / 64, optimizer, loss_id=loss_id)
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
        return [cases.grads(amp.master_params(optimizer)) for optimizer in optimizers]

    assert cases.same(gradients(nested=True), gradients(nested=False))


@pytest.mark.parametrize("level", cases.MIXED)
def test_a_second_backward_after_a_step_inside_the_block_works(level):
    model, optimizer = cases.prepared(level, loss_scale="dynamic")
    head = torch.zeros((), requires_grad=True)
    with amp.scale_loss(cases.loss_of(model, *cases.batch()) + head, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True, inputs=list(model.parameters()))
        optimizer.step()
        scaled_loss.backward(inputs=[head])
    assert head.grad == 2.0**16


@pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", cases.MIXED)
def test_a_delayed_pass_leaves_out_an_optimizer_that_a_later_pass_has_unscaled(level, loss_scale):
    models = [cases.net(), cases.net(seed=1)]
    optimizers = [cases.sgd(model.parameters()) for model in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0
    )
    x, y = cases.batch()
    loss = sum(cases.loss_of(model, x, y) for model in models)
    with amp.scale_loss(loss, optimizers, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    cases.backward(models[0], optimizers[0], x, y)
    before = cases.grads(amp.master_params(optimizers[0]))
    optimizers[1].step()
    assert cases.same(before, cases.grads(amp.master_params(optimizers[0])))


@pytest.mark.parametrize("delays", [(True, False), (True, True)])
@pytest.mark.parametrize("level", cases.MIXED)
def test_a_pass_of_another_loss_unscales_delayed_ones_by_their_own_scale(level, delays):
    def stepped(delays):
        model, optimizer = cases.prepared(level, num_losses=2, loss_scale="dynamic")
        amp._amp_state.loss_scalers[1]._loss_scale = 128.0
        for loss_id, (x, y) in enumerate(cases.batches(2)):
            options = {"loss_id": loss_id, "delay_unscale": delays[loss_id]}
            cases.backward(model, optimizer, x, y, **options)
        optimizer.step()
        return cases.masters(optimizer)

    assert cases.same(stepped((False, False)), stepped(delays))


@pytest.mark.parametrize("delayed", ["both", "the head's"])
@pytest.mark.parametrize("level", cases.MIXED)
def test_delayed_gradients_of_a_shared_parameter_are_unscaled_once(level, delayed):
    def grads(*, delay):
        model = cases.net()
        optimizers = [cases.sgd(model.parameters()), cases.sgd(model[2].parameters(), lr=0.0)]
        amp.initialize(model, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
        whole, head = optimizers
        first, second = cases.batches(2)
        given = optimizers if delayed == "both" else head
        cases.backward(model, given, *first, delay_unscale=delay)
        cases.backward(model, whole, *second)
        head.step()
        return cases.grads(head.param_groups[0]["params"])

    assert cases.same(grads(delay=False), grads(delay=True))


# -- several sessions ------------------------------------------------------------------------


def chained(level, calls, **options):
    """Two nets in a row, prepared by one ``initialize`` call or by one each."""
    nets = [torch.nn.Linear(4, 4), cases.net(1)]
    for seed, net in enumerate(nets):
        torch.manual_seed(seed)
        for param in net.parameters():
            torch.nn.init.normal_(param, std=0.5)
    optimizers = [cases.sgd(net.parameters()) for net in nets]
    if calls == 1:
        amp.initialize(nets, optimizers, opt_level=level, verbosity=0, **options)
    else:
        for net, optimizer in zip(nets, optimizers, strict=True):
            amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
    return nets, optimizers


def joint_step(nets, optimizers, x, y, **options):
    loss = cases.loss_of(torch.nn.Sequential(*nets), x, y) / 64
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_optimizers_of_several_calls_train_as_those_of_one(level, scale):
    trained = []
    for calls in (1, 2):
        nets, optimizers = chained(level, calls, loss_scale=scale)
        for step in range(4):
            make = cases.overflowing if step == 1 and scale == "dynamic" else cases.batch
            joint_step(nets, optimizers, *cases.batch(10 + step), delay_unscale=True)
            joint_step(nets, optimizers, *make(step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained.append([*map(cases.masters, optimizers), cases.loss_scale()])
        del nets, optimizers
    assert cases.same(trained[0][:2], trained[1][:2])
    assert trained[0][2] == trained[1][2] == (2.0**15 if scale == "dynamic" else 128.0)


@pytest.mark.parametrize("level", cases.MIXED)
def test_blocks_of_one_and_of_several_sessions_mix(level):
    """The older optimizer's own passes keep their own scale."""
    nets, optimizers = chained(level, 2, loss_scale="dynamic")
    plain, _ = chained("O0", 1)
    first = optimizers[0]
    joint_step(nets, optimizers, *cases.batch(1))
    with amp.scale_loss(nets[0](cases.batch(2)[0]).float().square().mean(), first) as scaled_loss:
        scaled_loss.backward()
    (cases.loss_of(torch.nn.Sequential(*plain), *cases.batch(1)) / 64).backward()
    plain[0](cases.batch(2)[0]).square().mean().backward()
    for optimizer, net in zip(optimizers, plain, strict=True):
        for param, expected in zip(amp.master_params(optimizer), net.parameters(), strict=True):
            torch.testing.assert_close(param.grad.float(), expected.grad, rtol=0.1, atol=1e-2)
