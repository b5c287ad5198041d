"""Training through the public API equals the loop written by hand, bit for bit."""

import pytest

from tests.support import loops
from tests.support.reference.loops import Loop

# torch's fused SGD keeps random numbers in an fp16 momentum on CPU, with or without amp (2.13).
PAIRS = [
    (level, name)
    for level in loops.LEVELS
    for name in loops.OPTIMIZERS
    if (level, name) != ("O3", "fused SGD")
]


def train_both(level, name, steps, **options):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], **options)
    loop = Loop(
        level,
        loops.net().parameters(),
        loops.OPTIMIZERS[name],
        scale=options.get("loss_scale"),
        interval=options.get("growth_interval", 2000),
    )
    train, train_by_hand = loops.stepper(loops, name), loops.stepper(loop, name)
    for x, y in steps:
        loss, loss_by_hand = train(model, optimizer, x, y), train_by_hand(x, y)
        assert loops.same(loss, loss_by_hand)
        assert loops.loss_scale() == loop.scale
        assert loops.same(list(model.parameters()), loop.model)
        assert loops.same(loops.masters(optimizer), loop.stepped)
    return model, optimizer, loop


@pytest.mark.parametrize(("level", "name"), PAIRS)
def test_training_at_a_level_equals_the_plain_loop(level, name):
    _, optimizer, loop = train_both(level, name, loops.batches(6))
    assert loops.same(optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])


@pytest.mark.parametrize(("level", "name"), PAIRS)
def test_training_with_planted_overflows_equals_the_plain_loop(level, name):
    steps = loops.batches(9, overflow_at={2, 3, 6})
    _, optimizer, loop = train_both(level, name, steps, loss_scale="dynamic", growth_interval=2)
    assert len(set(loop.scales)) > 2
    assert loops.same(optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", loops.OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_whose_first_step_overflows_equals_the_plain_loop(level, name):
    _, optimizer, loop = train_both(level, name, loops.batches(4, overflow_at={0}))
    assert loops.same(optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])


@pytest.mark.parametrize("level", loops.LEVELS)
def test_training_at_a_static_scale_equals_the_plain_loop(level):
    train_both(level, "Adam", loops.batches(4), loss_scale=128.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_static_scale_lets_inf_reach_the_parameters(level):
    x, y = loops.overflowing()
    model, optimizer = loops.prepared(level, loss_scale=8.0)
    loops.train_step(model, optimizer, x, y)
    assert not all(param.isfinite().all() for param in model.parameters())
    assert loops.loss_scale() == 8.0
