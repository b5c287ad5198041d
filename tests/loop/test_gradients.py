"""Rule A: one gradient in one place.

With a loss scale, the end of a block gives masters unscaled fp32 gradients and leaves the model's
own scaled. Without one, the model's 16-bit gradient is the gradient, until somebody takes it.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

masters = pytest.mark.parametrize("level", loops.WITH_MASTERS)
levels = pytest.mark.parametrize("level", loops.LEVELS_SHORT)


def expected(level, *data):
    """The exact sum of the gradients of plain passes over rounded weights."""
    model, _ = loops.prepared(level, loss_scale=1.0)
    for x, y in data:
        loops.loss_of(model, x, y).backward()
    return [param.grad.float() for param in model.parameters()]


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_after_a_block_with_a_scale_the_model_keeps_its_scaled_gradients(level):
    x, y = loops.batch()
    scaled, optimizer = loops.prepared(level, loss_scale=128.0, master_weights=True)
    loops.backward(scaled, optimizer, x, y)
    plain, _ = loops.prepared(level, loss_scale=1.0, master_weights=True)
    (loops.loss_of(plain, x, y) * 128.0).backward()
    wanted = [param.grad for param in plain.parameters()]
    kept = [param.grad for param in scaled.parameters()]
    assert loops.same(kept, wanted)
    optimizer.step()
    assert all(param.grad is grad for param, grad in zip(scaled.parameters(), kept, strict=True))
    loops.backward(scaled, optimizer, x, y)
    assert not any(p.grad is grad for p, grad in zip(scaled.parameters(), kept, strict=True))


def test_without_a_scale_the_gradient_stays_on_the_model_until_it_is_read():
    model, optimizer = loops.prepared("O5")
    wanted = expected("O5", loops.batch())
    loops.backward(model, optimizer, *loops.batch())
    assert all(param.grad.dtype is torch.bfloat16 for param in model.parameters())
    assert loops.same([master.grad for master in amp.master_params(optimizer)], wanted)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@masters
def test_gradients_are_plain_tensors_and_those_of_masters_end_with_the_step(level, scale):
    model, optimizer = loops.prepared(level, loss_scale=scale)
    for data in (loops.batch(), loops.overflowing()):
        loops.backward(model, optimizer, *data)
        assert all(type(param.grad) is torch.Tensor for param in model.parameters())
        assert all(type(master.grad) is torch.Tensor for master in amp.master_params(optimizer))
        optimizer.step()
        assert all(master.grad is None for master in amp.master_params(optimizer))


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_scale_one_without_masters_leaves_gradients_alone(level):
    model, optimizer = loops.prepared(level)
    x, y = loops.batch()
    loops.loss_of(model, x, y).backward()
    grads = [param.grad for param in model.parameters()]
    once = loops.values(grads)
    loops.backward(model, optimizer, x, y)
    for param, grad, value in zip(model.parameters(), grads, once, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, 2 * value)


@masters
def test_clipping_the_model_works_without_a_scale_alone(level):
    model, optimizer = loops.prepared(level)
    before = loops.masters(optimizer)
    loops.backward(model, optimizer, *(0.01 * each for each in loops.batch()))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    with (
        pytest.warns(match=r"ignores them(?s:.*)amp\.master_params")
        if level == "O2"
        else nullcontext()
    ):
        optimizer.step()
    moved = [(a - b).flatten() for a, b in zip(loops.masters(optimizer), before, strict=True)]
    assert bool(torch.cat(moved).norm() < 2e-5) is (level == "O5")


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
@levels
def test_zero_grad_clears_both_sides(level, clear, set_to_none):
    model, optimizer = loops.prepared(level, loss_scale=8.0)
    loops.backward(model, optimizer, *loops.batch())
    (optimizer if clear == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    for param in (*model.parameters(), *amp.master_params(optimizer)):
        assert param.grad is None or not (set_to_none or param.grad.any())


# -- passes of every kind train alike --------------------------------------------------------


def after_step(level, train, **options):
    model, optimizer = loops.prepared(level, **options)
    stepped = train(model, optimizer)
    if not stepped:
        optimizer.step()
    return loops.masters(optimizer)


def one_block(model, optimizer):
    loops.backward(model, optimizer, *loops.batch())


def without_a_block(model, optimizer):
    loops.loss_of(model, *loops.batch()).backward()


def delayed(model, optimizer):
    loops.backward(model, optimizer, *loops.batch(), delay_unscale=True)
    assert optimizer._amp_stash.params_have_scaled_gradients is True


def stepped_while_delayed(model, optimizer):
    with amp.scale_loss(
        loops.loss_of(model, *loops.batch()), optimizer, delay_unscale=True
    ) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert optimizer._amp_stash.params_have_scaled_gradients is False
    return True


def stepped_in_the_block(model, optimizer):
    with amp.scale_loss(loops.loss_of(model, *loops.batch()), optimizer) as scaled_loss:
        optimizer.zero_grad()
        scaled_loss.backward()
        optimizer.step()
    return True


@pytest.mark.parametrize("train", [delayed, stepped_while_delayed, stepped_in_the_block])
@levels
def test_a_step_finds_unscaled_gradients_wherever_it_is(level, train):
    options = {"loss_scale": 64.0}
    assert loops.same(after_step(level, one_block, **options), after_step(level, train, **options))


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_a_pass_without_a_block_trains_as_one_with_it(level):
    found = after_step(level, without_a_block, loss_scale=1.0)
    assert loops.same(found, after_step(level, one_block, loss_scale=1.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_pass_leaves_scaled_gradients_until_the_next(level):
    model, optimizer = loops.prepared(level, loss_scale=8.0)
    loops.backward(model, optimizer, *loops.batch(), delay_unscale=True)
    scaled = loops.grads(model.parameters())
    loops.scaled_backward(0 * loops.loss_of(model, *loops.batch()), optimizer)
    true = loops.grads(amp.master_params(optimizer))
    assert loops.same([grad.float() / 8.0 for grad in scaled], true)


@masters
def test_a_plain_pass_before_a_block_adds_to_it(level):
    model, optimizer = loops.prepared(level, loss_scale=1.0)
    first, second = loops.batches(2)
    loops.loss_of(model, *first).backward()
    loops.backward(model, optimizer, *second)
    wanted = map(torch.add, expected(level, first), expected(level, second))
    assert loops.same(loops.grads(amp.master_params(optimizer)), list(wanted))
