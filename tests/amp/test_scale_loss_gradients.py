"""What a ``scale_loss`` block does to gradients, scale and step."""

import gc
import weakref

import pytest
import torch

import apex.amp as amp
from tests.amp.cases import (
    DYNAMIC,
    LEVELS,
    backward,
    loss_of,
    one_weight,
    overflow,
    prepared,
    scale,
    slope,
    train,
    unskipped,
)

every_level = pytest.mark.parametrize("level", LEVELS)
with_masters = pytest.mark.parametrize("level", ["O2", "O5"])


def grads(optimizer):
    return [p.grad for p in amp.master_params(optimizer)]


# -- after the block -------------------------------------------------------------------------


@with_masters
def test_after_the_block_master_gradients_are_fp32_and_unscaled(level):
    model, optimizer = one_weight(level, loss_scale=8.0)
    backward(slope(model, 3.0), optimizer)
    assert [(g.dtype, g.item()) for g in grads(optimizer)] == [(torch.float32, 3.0)]


@with_masters
def test_after_the_block_model_gradients_are_low_and_unscaled(level):
    model, optimizer = one_weight(level, loss_scale=8.0)
    backward(slope(model, 3.0), optimizer)
    optimizer.step()
    assert (model.weight.grad.dtype, model.weight.grad.item()) == (model.weight.dtype, 3.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_without_masters_the_model_s_own_gradients_are_unscaled(level):
    model, optimizer = one_weight(level, loss_scale=8.0)
    backward(slope(model, 3.0), optimizer)
    assert model.weight.grad.item() == 3.0


@every_level
def test_clipping_between_block_and_step_bounds_the_update(level):
    model, optimizer = one_weight(level, loss_scale=64.0)
    backward(slope(model, 64.0), optimizer)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.875, rel=2**-8)


@pytest.mark.parametrize("level", DYNAMIC)
def test_an_overflow_skips_one_step_and_the_next_one_moves(level):
    model, optimizer = prepared(level)
    before = model.last.weight.detach().clone()
    overflow(model, optimizer)
    optimizer.step()
    assert torch.equal(model.last.weight, before)
    train(model, optimizer, steps=1)
    assert not torch.equal(model.last.weight, before)


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_a_static_scale_lets_inf_reach_the_parameters(level):
    model, optimizer = prepared(level)
    overflow(model, optimizer)
    optimizer.step()
    assert not torch.isfinite(model.last.weight).all()


@pytest.mark.parametrize(("given", "count"), [("dynamic", 3), (128.0, 3), (1.0, 3)])
def test_unskipped_counts_clean_passes_for_dynamic_and_static_scales(given, count):
    model, optimizer = prepared("O2", loss_scale=given)
    train(model, optimizer, steps=3)
    assert unskipped() == count


def test_the_scale_doubles_after_exactly_2000_clean_steps_and_unskipped_restarts():
    model, optimizer = one_weight("O1")
    amp._amp_state.loss_scalers[0]._unskipped = 1998
    found = []
    for _ in range(3):
        backward(0.0 * model.weight.sum(), optimizer)
        found.append((scale(), unskipped()))
    assert found == [(2.0**16, 1999), (2.0**17, 0), (2.0**17, 1)]


def test_an_overflow_halves_the_scale_and_restarts_unskipped():
    model, optimizer = prepared("O2")
    train(model, optimizer, steps=2)
    overflow(model, optimizer)
    assert (scale(), unskipped()) == (2.0**15, 0)


def test_growth_interval_and_factors_can_be_given():
    model, optimizer = prepared("O2", growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    train(model, optimizer, steps=2)
    assert scale() == 2.0**18
    overflow(model, optimizer)
    assert scale() == 2.0**16


def test_the_scale_stays_within_its_bounds():
    bounds = {"min_loss_scale": 2.0**15, "max_loss_scale": 2.0**17}
    model, optimizer = prepared("O2", growth_interval=1, **bounds)
    for _ in range(3):
        overflow(model, optimizer)
    assert scale() == 2.0**15
    optimizer.zero_grad()
    for _ in range(4):
        backward(0.0 * model.last.weight.float().sum(), optimizer)
    assert scale() == 2.0**17


@pytest.mark.filterwarnings("ignore:amp has skipped 50 steps")
def test_the_scale_never_reaches_0():
    model, optimizer = one_weight("O1")
    for _ in range(300):
        backward(torch.nan * model.weight.sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert scale() == torch.finfo(torch.float32).tiny
    assert model.weight == 1.0


# -- accumulation ----------------------------------------------------------------------------


@every_level
@pytest.mark.parametrize("delay", [False, True])
def test_both_ways_of_accumulation_equal_one_big_batch(level, delay):
    model, optimizer = one_weight(level)
    for last in (False, False, True):
        backward(slope(model, 0.25), optimizer, delay_unscale=delay and not last)
    assert [grad.item() for grad in grads(optimizer)] == [0.75]


def test_delay_unscale_leaves_gradients_scaled_until_the_last_pass():
    model, optimizer = one_weight("O1", loss_scale=8.0)
    backward(2.0 * model.weight.sum(), optimizer, delay_unscale=True)
    assert model.weight.grad == 16.0
    backward(2.0 * model.weight.sum(), optimizer)
    assert model.weight.grad == 4.0


def test_delay_unscale_moves_neither_scale_nor_count():
    model, optimizer = prepared("O2")
    overflow(model, optimizer, delay_unscale=True)
    assert (scale(), unskipped()) == (2.0**16, 0)


@pytest.mark.parametrize("level", DYNAMIC)
def test_an_overflow_in_a_delayed_pass_is_found_by_the_last(level):
    model, optimizer = prepared(level)
    before = model.last.weight.detach().clone()
    overflow(model, optimizer, delay_unscale=True)
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert scale() == 2.0**15
    assert torch.equal(model.last.weight, before)


def test_delay_overflow_check_leaves_the_scale_and_the_next_pass_moves_it_for_both():
    model, optimizer = prepared("O2")
    before = model.last.weight.detach().clone()
    overflow(model, optimizer, delay_overflow_check=True)
    assert scale() == 2.0**16
    backward(loss_of(model), optimizer)
    assert scale() == 2.0**15
    optimizer.step()
    assert torch.equal(model.last.weight, before)


def test_delay_overflow_check_still_skips_the_step():
    model, optimizer = prepared("O2")
    before = model.last.weight.detach().clone()
    overflow(model, optimizer, delay_overflow_check=True)
    optimizer.step()
    assert torch.equal(model.last.weight, before)


# -- inside the block ------------------------------------------------------------------------


@every_level
@pytest.mark.parametrize("given", [None, 8.0, "dynamic"])
def test_a_step_inside_the_block_steps_by_unscaled_gradients(level, given):
    model, optimizer = one_weight(level, loss_scale=given)
    with amp.scale_loss(slope(model, 0.5), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert model.weight == 0.9375


@pytest.mark.parametrize("level", DYNAMIC)
def test_a_step_inside_the_block_is_skipped_on_overflow(level):
    model, optimizer = one_weight(level)
    with amp.scale_loss(slope(model, torch.inf), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert model.weight == 1.0
    assert scale() == 2.0**15


def test_a_step_inside_the_block_moves_the_scale_once():
    model, optimizer = one_weight("O2")
    with amp.scale_loss(slope(model, torch.inf), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
        optimizer.step()
    assert (scale(), unskipped()) == (2.0**15, 0)


@pytest.mark.filterwarnings("ignore:optimizer.step")  # tests/training/test_mistakes.py
@every_level
def test_a_step_before_any_scale_loss_works(level):
    model, optimizer = one_weight(level)
    optimizer.step()
    assert model.weight == 1.0
    model.weight.float().sum().backward()
    optimizer.step()
    assert model.weight == 0.875


@every_level
def test_retain_graph_backs_twice_through_one_graph(level):
    model, optimizer = one_weight(level)
    loss = slope(model, 0.25)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    backward(loss, optimizer)
    assert [grad.item() for grad in grads(optimizer)] == [0.5]


# -- an exception inside ---------------------------------------------------------------------


def fail(loss, optimizer, *, backward_first):
    def block():
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            if backward_first:
                scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        block()


@every_level
@pytest.mark.parametrize("late", [False, True], ids=["before backward", "after backward"])
def test_an_exception_inside_leaves_the_next_block_usable(level, late):
    model, optimizer = one_weight(level, loss_scale="dynamic")
    fail(slope(model, torch.inf), optimizer, backward_first=late)
    assert (scale(), unskipped()) == (2.0**16, 0)
    backward(slope(model, 0.5), optimizer)
    optimizer.step()
    assert model.weight == 0.9375


@pytest.mark.parametrize("level", DYNAMIC)
def test_an_exception_inside_leaves_the_gradients_from_before(level):
    model, optimizer = one_weight(level)
    backward(slope(model, 0.25), optimizer)
    fail(slope(model, 0.5), optimizer, backward_first=True)
    assert [grad.item() for grad in grads(optimizer)] == [0.25]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_exception_inside_turns_casts_on_again(level):
    model, optimizer = prepared(level)
    with pytest.raises(KeyError), amp.scale_loss(loss_of(model), optimizer):
        raise KeyError
    x = torch.ones(2, 2)
    assert (x @ x).dtype is not torch.float32


# -- what it keeps ---------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [False, True])
def test_no_loss_is_kept_after_the_step(delay):
    model, optimizer = prepared("O2")
    loss = loss_of(model)
    seen = weakref.ref(loss)
    backward(loss, optimizer, delay_unscale=delay)
    del loss
    if delay:
        backward(loss_of(model), optimizer)
    optimizer.step()
    gc.collect()
    assert seen() is None
