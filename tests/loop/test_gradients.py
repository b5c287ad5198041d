"""Rule A: one gradient in one place.

With a loss scale, the end of a block gives masters unscaled fp32 gradients and leaves the model's
own scaled. Without one, the model's 16-bit gradient is the gradient, until somebody takes it.

Changed on purpose by issue 43: the model's gradients stay scaled, masters' end with the step, and
all of them are plain tensors.
"""

import contextlib

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as t


def expected(level, *data):
    """The exact sum of the gradients of plain passes over rounded weights."""
    model, _ = t.prepared(level, loss_scale=1.0)
    for x, y in data:
        t.loss_of(model, x, y).backward()
    return [param.grad.float() for param in model.parameters()]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("passes", [1, 3])
def test_masters_have_the_sum_of_the_passes_in_fp32(level, passes):
    model, optimizer = t.prepared(level, loss_scale=1.0)
    data = list(t.batches(passes))
    for x, y in data:
        t.backward(model, optimizer, x, y)
    each = [expected(level, one) for one in data]
    for index, master in enumerate(amp.master_params(optimizer)):
        total = each[0][index]
        for other in each[1:]:
            total = total + other[index]
        assert master.grad.dtype is torch.float32
        assert torch.equal(master.grad, total)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_after_a_block_with_a_scale_the_model_keeps_its_scaled_gradients(level):
    x, y = t.batch()
    scaled, optimizer = t.prepared(level, loss_scale=128.0, master_weights=True)
    t.backward(scaled, optimizer, x, y)
    plain, _ = t.prepared(level, loss_scale=1.0, master_weights=True)
    (t.loss_of(plain, x, y) * 128.0).backward()
    wanted = [param.grad for param in plain.parameters()]
    kept = [param.grad for param in scaled.parameters()]
    assert t.same(kept, wanted)
    optimizer.step()
    assert all(param.grad is grad for param, grad in zip(scaled.parameters(), kept, strict=True))
    t.backward(scaled, optimizer, x, y)
    assert not any(p.grad is grad for p, grad in zip(scaled.parameters(), kept, strict=True))


def test_without_a_scale_the_gradient_stays_on_the_model_until_it_is_read():
    model, optimizer = t.prepared("O5")
    wanted = expected("O5", t.batch())
    t.backward(model, optimizer, *t.batch())
    assert all(param.grad.dtype is torch.bfloat16 for param in model.parameters())
    assert t.same([master.grad for master in amp.master_params(optimizer)], wanted)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("level", t.WITH_MASTERS)
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_gradients_are_plain_tensors(level, scale):
    model, optimizer = t.prepared(level, loss_scale=scale)
    t.backward(model, optimizer, *t.batch())
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())
    assert all(type(master.grad) is torch.Tensor for master in amp.master_params(optimizer))


@pytest.mark.parametrize("level", t.WITH_MASTERS)
@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
def test_the_gradients_of_masters_end_with_the_step(level, scale):
    model, optimizer = t.prepared(level, loss_scale=scale)
    for data in (t.batch(), t.overflowing()):
        t.backward(model, optimizer, *data)
        optimizer.step()
        assert all(master.grad is None for master in amp.master_params(optimizer))


@pytest.mark.parametrize("level", t.WITH_MASTERS)
def test_clipping_the_model_works_without_a_scale_alone(level):
    model, optimizer = t.prepared(level)
    before = t.masters(optimizer)
    t.backward(model, optimizer, *(0.01 * each for each in t.batch()))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    optimizer.step()
    moved = [(a - b).flatten() for a, b in zip(t.masters(optimizer), before, strict=True)]
    assert bool(torch.cat(moved).norm() < 2e-5) is (level == "O5")


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_both_sides(level, clear, set_to_none):
    model, optimizer = t.prepared(level, loss_scale=8.0)
    t.backward(model, optimizer, *t.batch())
    (optimizer if clear == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    for param in (*model.parameters(), *amp.master_params(optimizer)):
        assert param.grad is None or not (set_to_none or param.grad.any())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_passes_without_zero_grad_do_not_add_up_over_steps_with_it_in_between(level):
    runs = []
    for clear in ("before", "after"):
        model, optimizer = t.prepared(level, loss_scale=8.0)
        for x, y in t.batches(3):
            if clear == "before":
                optimizer.zero_grad()
            t.backward(model, optimizer, x, y)
            optimizer.step()
            if clear == "after":
                model.zero_grad()
        runs.append(t.masters(optimizer))
    assert t.same(*runs)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_plain_backward_without_scale_loss_trains_as_by_hand(level):
    model, optimizer = t.prepared(level, loss_scale=1.0)
    x, y = t.batch()
    grads = expected(level, (x, y))
    wanted = [m.detach() - 0.1 * g for m, g in zip(t.masters(optimizer), grads, strict=True)]
    t.loss_of(model, x, y).backward()
    optimizer.step()
    for master, value in zip(t.masters(optimizer), wanted, strict=True):
        assert torch.allclose(master, value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_clipping_masters_after_the_block_clips_the_step(level, scale):
    model, optimizer = t.prepared(level, loss_scale=scale)
    before = t.masters(optimizer)
    t.backward(model, optimizer, *t.batch())
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    optimizer.step()
    moved = [a - b for a, b in zip(t.masters(optimizer), before, strict=True)]
    norm = torch.cat([each.flatten() for each in moved]).norm()
    assert torch.allclose(norm, torch.tensor(0.1 * 0.01), rtol=1e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("make", [t.sgd, t.fused_adamw_of])
def test_amp_clip_grad_norm_equals_clipping_the_masters(level, make):
    runs = []
    for own in (True, False):
        model, optimizer = t.prepared(level, make, loss_scale=8.0 if level != "O5" else 1.0)
        for x, y in t.batches(3):
            optimizer.zero_grad()
            t.backward(model, optimizer, x, y)
            if own:
                norm = amp.clip_grad_norm_(optimizer, 0.05)
            else:
                norm = nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 0.05)
            optimizer.step()
        runs.append((norm, t.masters(optimizer)))
    assert torch.allclose(runs[0][0], runs[1][0])
    for one, other in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("delay", [False, True])
def test_accumulated_passes_train_like_one_batch(level, scale, delay):
    model, optimizer = t.prepared(level, loss_scale=scale)
    start = t.masters(optimizer)
    data = list(t.batches(3))
    for number, (x, y) in enumerate(data):
        t.backward(model, optimizer, x, y, delay_unscale=delay and number < 2)
    optimizer.step()
    got = t.masters(optimizer)
    plain = [start_of.clone().requires_grad_() for start_of in start]
    for x, y in data:
        hidden = torch.relu(x @ plain[0].T + plain[1])
        torch.nn.functional.mse_loss(hidden @ plain[2].T + plain[3], y).backward()
    for value, param in zip(got, plain, strict=True):
        assert torch.allclose(value, param.detach() - 0.1 * param.grad, rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_exception_inside_the_block_leaves_earlier_gradients(level):
    model, optimizer = t.prepared(level, loss_scale=8.0)
    x, y = t.batch()
    t.backward(model, optimizer, x, y)
    before = [master.grad.clone() for master in amp.master_params(optimizer)]
    with (
        contextlib.suppress(KeyError),
        amp.scale_loss(t.loss_of(model, x, y), optimizer) as scaled,
    ):
        scaled.backward()
        raise KeyError
    assert t.same(before, [master.grad for master in amp.master_params(optimizer)])
    t.train_step(model, optimizer, x, y)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_block_inside_another_of_the_same_optimizer_is_refused(level):
    model, optimizer = t.prepared(level)
    loss = t.loss_of(model, *t.batch())
    with (
        amp.scale_loss(loss, optimizer),
        pytest.raises(RuntimeError, match="inside another"),
        amp.scale_loss(loss, optimizer),
    ):
        pass


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_step_inside_the_block_equals_one_after_it(level):
    runs = []
    for inside in (True, False):
        model, optimizer = t.prepared(level, loss_scale=8.0)
        for x, y in t.batches(3):
            optimizer.zero_grad()
            with amp.scale_loss(t.loss_of(model, x, y), optimizer) as scaled:
                scaled.backward()
                if inside:
                    optimizer.step()
            if not inside:
                optimizer.step()
        runs.append(t.masters(optimizer))
    assert t.same(*runs)


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_scale_one_without_masters_leaves_gradients_alone(level):
    model, optimizer = t.prepared(level)
    x, y = t.batch()
    t.loss_of(model, x, y).backward()
    grads = [param.grad for param in model.parameters()]
    once = t.values(grads)
    t.backward(model, optimizer, x, y)
    for param, grad, value in zip(model.parameters(), grads, once, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, 2 * value)
