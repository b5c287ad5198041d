"""Several losses, optimizers, models and sessions."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

levels = pytest.mark.parametrize("level", loops.LEVELS_SHORT)


def run(block, *inside):
    with block as scaled_loss:
        for other in inside:
            run(other)
        scaled_loss.backward()


@pytest.mark.parametrize("loss_ids", [(0, 0), (0, 1)])
@levels
def test_blocks_inside_each_other_give_the_gradients_of_blocks_after_each_other(level, loss_ids):
    found = []
    for nested in (True, False):
        models = [loops.net(1), loops.net(2)]
        optimizers = [loops.sgd(model.parameters()) for model in models]
        # The scale grows with every pass, so the outer block ends at another one.
        options = {"num_losses": 2, "loss_scale": "dynamic", "growth_interval": 1}
        amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
        losses = [loops.loss_of(model, *loops.batch()) / 64 for model in models]
        outer, inner = map(amp.scale_loss, losses, optimizers, loss_ids)
        run(outer, inner) if nested else [run(block) for block in (outer, inner)]
        found.append([loops.grads(amp.master_params(optimizer)) for optimizer in optimizers])
    assert loops.same(*found)


@levels
def test_a_second_backward_after_a_step_inside_the_block_works(level):
    model, optimizer = loops.prepared(level, loss_scale="dynamic")
    head = torch.zeros((), requires_grad=True)
    with amp.scale_loss(loops.loss_of(model, *loops.batch()) + head, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True, inputs=list(model.parameters()))
        optimizer.step()
        scaled_loss.backward(inputs=[head])
    assert head.grad == 2.0**16


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
