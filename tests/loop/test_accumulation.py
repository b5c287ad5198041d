"""Gradients of several passes add up as those of one big batch."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases


def exact_net():
    """A net and data of few binary digits: no rounding at any level, in any order of summation."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view_as(param) % 3 * 0.5 - index * 0.25)
    return model


X = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 1.0], [-1.0, 0.5]])


def loss_of(model, x):
    return model(x).float().sum() / 256


def make_optimizer(params):
    return cases.sgd(params, lr=32.0)


def after_step(optimizer):
    optimizer.step()
    return cases.masters(optimizer)


def one_big_batch():
    model = exact_net()
    optimizer = make_optimizer(model.parameters())
    loss_of(model, X).backward()
    return after_step(optimizer)


@pytest.mark.parametrize("loss_scale", [None, "dynamic", 64.0])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_accumulated_passes_equal_one_big_batch(level, delay, loss_scale):
    model, optimizer = cases.prepared(level, make_optimizer, exact_net(), loss_scale=loss_scale)
    for index, rows in enumerate((X[:1], X[1:3], X[3:])):
        with amp.scale_loss(
            loss_of(model, rows), optimizer, delay_unscale=delay and index < 2
        ) as scaled_loss:
            scaled_loss.backward()
    stored = [param.dtype for param in amp.master_params(optimizer)]
    expected = [value.to(dtype) for value, dtype in zip(one_big_batch(), stored, strict=True)]
    assert cases.same(expected, after_step(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delay_unscale_leaves_gradients_scaled_until_the_last_pass(level):
    model, optimizer = cases.prepared(level, model=exact_net())
    with amp.scale_loss(loss_of(model, X), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    scaled = [param.grad.clone().float() for param in model.parameters()]
    with amp.scale_loss(loss_of(model, X) * 0, optimizer) as scaled_loss:
        scaled_loss.backward()
    true = [param.grad for param in amp.master_params(optimizer)]
    assert cases.same([grad / 2.0**16 for grad in scaled], true)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_after_a_delayed_series_the_stash_says_that_gradients_are_unscaled(level):
    model, optimizer = cases.prepared(level, model=exact_net())
    for delay in (True, False):
        with amp.scale_loss(loss_of(model, X), optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
        assert optimizer._amp_stash.params_have_scaled_gradients is delay


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_step_after_a_delayed_pass_unscales_first(level):
    model, optimizer = cases.prepared(level, make_optimizer, exact_net(), loss_scale=64.0)
    with amp.scale_loss(loss_of(model, X), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    assert cases.same(one_big_batch(), after_step(optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_step_inside_a_delayed_block_leaves_nothing_scaled(level):
    model, optimizer = cases.prepared(level, make_optimizer, exact_net(), loss_scale=64.0)
    with amp.scale_loss(loss_of(model, X), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert optimizer._amp_stash.params_have_scaled_gradients is False
    assert cases.same(one_big_batch(), cases.masters(optimizer))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_plain_backward_before_a_scaled_one_accumulates(level):
    model, optimizer = cases.prepared(level, make_optimizer, exact_net())
    loss_of(model, X[:2]).backward()
    with amp.scale_loss(loss_of(model, X[2:]), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert cases.same(one_big_batch(), after_step(optimizer))
