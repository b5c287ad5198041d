"""Several calls, losses and optimizers: each has its scales, and nothing outlives its objects."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from apex import amp
from tests.support import loops

casting = pytest.mark.parametrize("level", ["O1", "O4"])


def test_a_session_lives_as_long_as_its_model_or_its_optimizer(level):
    for order in (0, 1):
        held = [*loops.prepared(level)]
        loops.train(*held)
        watched = [weakref.ref(each) for each in (*held, *amp.master_params(held[1]))]
        assert loops.live_sessions() == 1
        del held[order]
        assert loops.live_sessions() == 1
        held.clear()
        assert loops.live_sessions() == 0
        assert [each() for each in watched] == [None] * len(watched)
    with pytest.raises(ValueError, match="holds no parameter"):
        amp.initialize(loops.net(), loops.sgd(loops.net().parameters()), opt_level=level)
    assert loops.live_sessions() == 0


@pytest.mark.parametrize("placeholder", [nn.Identity, list])
def test_the_optimizer_may_come_in_a_later_call_than_its_model(level, placeholder):
    # The first call has no optimizer, so it keeps no masters.
    model = loops.net().bfloat16().float()
    twin = copy.deepcopy(model)
    options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
    twin, optimizer = amp.initialize(twin, loops.sgd(twin.parameters()), **options)
    model = amp.initialize(model, opt_level=level, num_losses=0, verbosity=0)
    assert len(amp._amp_state.loss_scalers) == 0
    _, later = amp.initialize(placeholder(), loops.sgd(model.parameters()), **options)
    loops.train(twin, optimizer)
    loops.train(model, later)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_a_model_follows_the_masters_of_a_later_call(level):
    options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
    model = amp.initialize(loops.Weights(), **options)
    _, optimizer = amp.initialize(nn.Identity(), loops.sgd(model.parameters()), **options)
    for factor in (4096.0, 0.5):
        model(a=factor).backward()
    assert model.a.grad.tolist() == [4096.5] * 2
    with amp.scale_loss(model(a=1.0), optimizer):
        model.zero_grad()
    assert model.a.grad is None
    master, _ = amp.master_params(optimizer)
    with torch.no_grad():
        master.copy_(torch.tensor([2.0, 2.0 + 2.0**-20]))
    assert model(a=1.0).item() == 4.0
    assert torch.equal(model.state_dict()["a"], master)


def shares_of_one_call_or_two(level, calls, part):
    """What trains by turns with two optimizers: a model, and a part of it or again the model."""
    model = loops.net()
    optimizers = loops.sgd(model.parameters()), torch.optim.Adam(model[2].parameters())
    other = nn.Sequential(model[2]) if part else nn.Identity()
    options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
    if calls == 1:
        amp.initialize([model, other], [*optimizers], **options)
    else:
        amp.initialize(model, optimizers[0], **options)
        amp.initialize(other, optimizers[1], **options)
    return model, optimizers


@loops.every(part=[True, False], level=["O2", "O3", "O5"])
def test_calls_that_share_weights_train_as_one_call(level, part):
    trained = []
    for calls in (1, 2):
        model, optimizers = shares_of_one_call_or_two(level, calls, part)
        for optimizer in optimizers * 2:
            loops.train(model, optimizer)
        trained.append([*map(loops.masters, optimizers), loops.values(model.state_dict().values())])
    assert loops.same(*trained)


def test_training_at_two_levels_by_turns_equals_training_at_each_alone():
    def losses(level, other=None):
        partner = loops.prepared(other) if other else None
        pair = loops.prepared(level)
        found = []
        for x, y in loops.batches(3):
            found.append(loops.train_step(*pair, x, y).item())
            if partner:
                loops.train_step(*partner, x, y)
        return found

    alone = losses("O4")
    for other in ("O0", "O1", "O5"):
        assert losses("O4", other) == alone


# -- casts of the thread ---------------------------------------------------------------------


@casting
def test_objects_may_be_freed_inside_a_backward_pass(level):
    held = [loops.prepared(level)]
    x = torch.ones(2, requires_grad=True)

    def free(grad):  # as a garbage collection may do there
        held.clear()
        gc.collect()

    y = x * 2
    y.register_hook(free)
    y.sum().backward()
    with amp.disable_casts():  # at the latest at this thread's next call of amp
        pass
    assert loops.product() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


# -- a prepared model with fp32 weights is prepared again ------------------------------------


@pytest.mark.parametrize(("level", "then"), [("O0", "O1"), ("O1", "O1"), ("O4", "O0")])
def test_the_level_of_the_last_call_counts_and_it_trains_as_after_restore(level, then):
    model, twin = loops.net(), loops.net()
    expected = []
    for each in (level, then):
        _, optimizer = loops.prepared(each, model=twin)
        expected.append(loops.train(twin, optimizer))
        amp.restore(twin, optimizer)
    for each, losses in zip((level, then), expected, strict=True):
        _, optimizer = loops.prepared(each, model=model)
        assert loops.train(model, optimizer) == losses
    gc.collect()
    assert len(amp.state_dict()) == 1  # the first optimizer goes with its scale
    with pytest.raises(ValueError, match="no parameter of the given models"):
        amp.initialize(model, loops.sgd(loops.net().parameters()), opt_level=level)
    with torch.no_grad():
        assert model(torch.ones(2, 4)).dtype is loops.LEVELS[then].compute
    amp.restore(model, optimizer)
    assert (type(model), loops.live_sessions()) == (nn.Sequential, 0)


@casting
def test_a_model_prepared_without_an_optimizer_between_steps_trains_on(level):
    model, optimizer = loops.trained(level, steps=3)
    model = amp.initialize(model, opt_level=level, verbosity=0)
    before = [param.detach().clone() for param in model.parameters()]
    loops.train(model, optimizer)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("others", [0, 1])
def test_a_session_may_end_while_torch_runs_hooks_of_a_step(others):
    """What holds the last reference lets go in a hook, as the garbage collector may."""
    sessions = [loops.prepared("O5") for _ in range(others)]
    held = [loops.prepared("O5")]
    handles = [register_optimizer_step_post_hook(lambda *_: held.clear()) for _ in range(2)]
    try:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight], lr=0.1).step()
        assert loops.live_sessions() == others
    finally:
        for handle in handles:
            handle.remove()
    sessions.append(loops.prepared("O5"))
    sessions.clear()
    gc.collect()
    assert not _global_optimizer_post_hooks


def run(block, *inside):
    with block as scaled_loss:
        for other in inside:
            run(other)
        scaled_loss.backward()


@pytest.mark.parametrize("loss_ids", [(0, 0), (0, 1)])
def test_blocks_inside_each_other_give_the_gradients_of_blocks_after_each_other(level, loss_ids):
    found = []
    for nested in (True, False):
        models = [loops.net(1), loops.net(2)]
        optimizers = [loops.sgd(model.parameters()) for model in models]
        # The scale grows with every pass, so the outer block ends at another one.
        options = {"num_losses": 2, "loss_scale": "dynamic", "growth_interval": 1}
        amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
        for model, optimizer in zip(models, optimizers, strict=True):
            loops.scaled_backward(loops.loss_of(model, *loops.batch()) / 64, optimizer)
        losses = [loops.loss_of(model, *loops.batch(2)) / 64 for model in models]
        outer, inner = map(amp.scale_loss, losses, optimizers, loss_ids)
        if nested:
            run(outer, inner)
        else:
            run(outer)
            run(inner)
        found.append([loops.grads(amp.master_params(optimizer)) for optimizer in optimizers])
    assert loops.same(*found)


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
