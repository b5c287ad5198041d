"""Rule B: an overflow skips the next step, once."""

import pytest
import torch

from apex import amp
from tests.support import training as t

DYNAMIC = {"loss_scale": "dynamic"}


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
@pytest.mark.parametrize("name", ["fused AdamW", "Adam", "SGD", "fused SGD"])
def test_a_skipped_step_leaves_weights_and_state(level, name):
    model, optimizer = t.prepared(level, t.OPTIMIZERS[name], **DYNAMIC)
    for x, y in t.batches(2):
        t.train_step(model, optimizer, x, y)
    state = t.saved_and_loaded(optimizer.state_dict()["state"])
    before = t.masters(optimizer), t.values(model.parameters())
    t.train_step(model, optimizer, *t.overflowing())
    assert t.same(before, (t.masters(optimizer), t.values(model.parameters())))
    if name not in ("fused AdamW",):  # whose kernel takes its step count back
        assert t.same(state, optimizer.state_dict()["state"])
    assert amp.step_was_skipped(optimizer, on_host=True)


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_the_step_after_a_skipped_one_is_taken(level):
    model, optimizer = t.prepared(level, **DYNAMIC)
    t.train_step(model, optimizer, *t.overflowing())
    before = t.masters(optimizer)
    t.train_step(model, optimizer, *t.batch())
    assert not t.same(before, t.masters(optimizer))
    assert not amp.step_was_skipped(optimizer, on_host=True)


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand"])
def test_clearing_gradients_does_not_take_an_overflow_back(level, clear):
    model, optimizer = t.prepared(level, **DYNAMIC)
    before = t.masters(optimizer)
    t.backward(model, optimizer, *t.overflowing())
    if clear == "by hand":
        for param in (*model.parameters(), *amp.master_params(optimizer)):
            param.grad = None
    else:
        (optimizer if clear == "optimizer" else model).zero_grad()
    t.backward(model, optimizer, *(0.01 * each for each in t.batch()))
    optimizer.step()
    assert t.same(before, t.masters(optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_overflow_in_any_pass_skips_the_step(level, name, where):
    model, optimizer = t.prepared(level, t.OPTIMIZERS[name], **DYNAMIC)
    before = t.masters(optimizer)
    for x, y in t.batches(3, overflow_at={where}):
        t.backward(model, optimizer, x, y)
    optimizer.step()
    assert t.same(before, t.masters(optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_an_overflow_of_one_loss_skips_the_optimizers_given_with_it(level):
    models = [t.net(0), t.net(1), t.net(2)]
    optimizers = [t.sgd(model.parameters()) for model in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=level, verbosity=0, num_losses=2, **DYNAMIC
    )
    before = [t.masters(each) for each in optimizers]
    x, y = t.overflowing()
    with amp.scale_loss(t.loss_of(models[0], x, y), optimizers[:2], loss_id=0) as scaled:
        scaled.backward()
    with amp.scale_loss(t.loss_of(models[2], *t.batch()), optimizers[2], loss_id=1) as scaled:
        (scaled / 256).backward()
    for optimizer in optimizers:
        optimizer.step()
    after = [t.masters(each) for each in optimizers]
    same = [t.same(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [True, True, False]
    assert [t.loss_scale(0), t.loss_scale(1)] == [2.0**15, 2.0**16]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_static_scale_skips_nothing(level):
    model, optimizer = t.prepared(level, loss_scale=8.0)
    t.train_step(model, optimizer, *t.overflowing())
    assert not all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_an_overflow_in_a_closure_puts_everything_back(level):
    model, optimizer = t.prepared(level, t.OPTIMIZERS["LBFGS closure"], **DYNAMIC)
    before = t.masters(optimizer)
    loss = t.train_step_with_closure(model, optimizer, *t.overflowing())
    assert not loss.isfinite()
    assert t.same(before, t.masters(optimizer))
    t.train_step_with_closure(model, optimizer, *t.batch())
    assert not t.same(before, t.masters(optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_each_overflow_is_printed_once_for_each_optimizer(level, capsys):
    model, optimizer = t.net(), None
    optimizer = t.sgd(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=1, **DYNAMIC)
    capsys.readouterr()
    for x, y in (t.overflowing(), t.overflowing(), t.batch()):
        t.train_step(model, optimizer, x, y)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Gradient overflow" in line]
    assert lines == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0",
    ]


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_delay_overflow_check_moves_the_scale_once_for_two_passes(level):
    model, optimizer = t.prepared(level, **DYNAMIC)
    before = t.masters(optimizer)
    x, y = t.overflowing()
    t.backward(model, optimizer, x, y, delay_overflow_check=True)
    assert t.loss_scale() == 2.0**16
    t.backward(model, optimizer, *t.batch())
    assert t.loss_scale() == 2.0**15
    optimizer.step()
    assert t.same(before, t.masters(optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_a_scheduler_does_not_bypass_the_skip(level):
    model = t.net()
    optimizer = t.sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **DYNAMIC)
    before = t.masters(optimizer)
    t.train_step(model, optimizer, *t.overflowing())
    scheduler.step()
    assert t.same(before, t.masters(optimizer))
