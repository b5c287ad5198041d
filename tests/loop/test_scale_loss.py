"""A ``scale_loss`` block: what it accepts and yields, and what it does to gradients and scale."""

import gc
import inspect
import weakref

import pytest
import torch

import apex.amp as amp
from tests.support.steps import (
    LEVELS,
    Net,
    backward,
    loss_of,
    nothing_changes,
    one_weight,
    overflow,
    prepared,
    scale,
    sgd,
    slope,
    train,
    unskipped,
)

every_level = pytest.mark.parametrize("level", LEVELS)
levels = pytest.mark.parametrize("level", ["O1", "O2", "O5"])


def grads(optimizer):
    return [p.grad.item() for p in amp.master_params(optimizer)]


def test_the_arguments_have_apexs_order_and_defaults():
    parameters = inspect.signature(amp.scale_loss).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("loss", inspect.Parameter.empty),
        ("optimizers", inspect.Parameter.empty),
        ("loss_id", 0),
        ("model", None),
        ("delay_unscale", False),
        ("delay_overflow_check", False),
    ]


# -- the block -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_of_any_floating_dtype_is_scaled_in_fp32_at_least(dtype, shape):
    model, optimizer = one_weight("O2", loss_scale=8.0)
    loss = slope(model, 3.0).to(dtype).reshape(shape)
    with amp.scale_loss(loss, optimizer, model=model) as scaled_loss:
        assert (scaled_loss.shape, scaled_loss.item()) == (shape, 24.0)
        assert torch.finfo(scaled_loss.dtype).bits >= 32
        scaled_loss.backward()
    assert grads(optimizer) == [3.0]


@every_level
def test_gradients_are_unscaled_after_the_block_and_fp32_on_masters(level):
    model, optimizer = one_weight(level, loss_scale=8.0)
    backward(slope(model, 3.0), [optimizer, optimizer])  # counts once
    (param,) = amp.master_params(optimizer)
    assert (param.grad.item(), param.grad.dtype) == (3.0, param.dtype)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.875, rel=2**-8)


@every_level
def test_scale_1_gives_the_loss_itself(level):
    model, optimizer = prepared(level, loss_scale=1.0)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == loss


def test_an_empty_list_only_scales():
    model, _ = one_weight("O1")
    with amp.scale_loss(model.weight.sum(), []) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad == 2.0**16


def test_an_fp16_loss_overflows_at_the_first_scale_and_then_trains():
    model, optimizer = one_weight("O1")
    for expected in (2.0**15, 2.0**15):
        backward(model.weight.sum().half(), optimizer)
        assert scale() == expected
    for weight in (1.0, 0.875):  # an overflow skips the next step, once
        optimizer.zero_grad()
        backward(model.weight.sum().half(), optimizer)
        optimizer.step()
        assert model.weight == weight


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_loss_whose_own_backward_scales_it_takes_part_once(level):
    model, optimizer = one_weight(level)
    loss = slope(model, 1.0)

    def own_backward():
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    loss.backward = own_backward
    loss.backward()
    assert grads(optimizer) == [1.0]


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


# -- the scale -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["dynamic", 128.0, 1.0])
def test_unskipped_counts_clean_passes(given):
    model, optimizer = prepared("O2", loss_scale=given)
    train(model, optimizer, steps=3)
    assert unskipped() == 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_halves_the_scale_skips_one_step_and_restarts_the_count(level):
    model, optimizer = prepared(level)
    train(model, optimizer, steps=2)
    before = model.last.weight.detach().clone()
    overflow(model, optimizer)
    assert (scale(), unskipped()) == (2.0**15, 0)
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


def test_the_scale_doubles_after_exactly_2000_clean_steps():
    model, optimizer = one_weight("O1")
    amp._amp_state.loss_scalers[0]._unskipped = 1998
    found = []
    for _ in range(3):
        backward(0.0 * model.weight.sum(), optimizer)
        found.append((scale(), unskipped()))
    assert found == [(2.0**16, 1999), (2.0**17, 0), (2.0**17, 1)]


def test_factors_interval_and_bounds_can_be_given():
    options = {"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
    bounds = {"min_loss_scale": 2.0**15, "max_loss_scale": 2.0**19}
    model, optimizer = prepared("O2", **options, **bounds)
    scales = []
    for _ in range(3):
        overflow(model, optimizer)
        scales.append(scale())
        optimizer.step()
    optimizer.zero_grad()
    for _ in range(6):
        backward(0.0 * model.last.weight.float().sum(), optimizer)
        scales.append(scale())
    start, least, most = 2.0**15, 2.0**17, 2.0**19
    assert scales == [start, start, start, start, least, least, most, most, most]


@pytest.mark.filterwarnings("ignore:amp has skipped 50 steps")
def test_the_scale_never_reaches_0():
    model, optimizer = one_weight("O1")
    for _ in range(300):
        backward(torch.nan * model.weight.sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert (scale(), model.weight) == (torch.finfo(torch.float32).tiny, 1.0)


# -- accumulation ----------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("delay", [False, True])
def test_both_ways_of_accumulation_equal_one_big_batch(level, delay):
    model, optimizer = one_weight(level)
    for last in (False, False, True):
        backward(slope(model, 0.25), optimizer, delay_unscale=delay and not last)
    assert grads(optimizer) == [0.75]


def test_delay_unscale_leaves_gradients_scaled_until_the_last_pass():
    model, optimizer = one_weight("O1", loss_scale=8.0)
    backward(2.0 * model.weight.sum(), optimizer, delay_unscale=True)
    assert model.weight.grad == 16.0
    backward(2.0 * model.weight.sum(), optimizer)
    assert model.weight.grad == 4.0


@pytest.mark.parametrize("option", ["delay_unscale", "delay_overflow_check"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_overflow_moves_the_scale_with_the_next_pass_and_skips(level, option):
    model, optimizer = prepared(level)
    before = model.last.weight.detach().clone()
    overflow(model, optimizer, **{option: True})
    assert (scale(), unskipped()) == (2.0**16, 0)
    backward(loss_of(model), optimizer)
    assert scale() == 2.0**15
    optimizer.step()
    assert torch.equal(model.last.weight, before)


@levels
def test_retain_graph_backs_twice_through_one_graph(level):
    model, optimizer = one_weight(level)
    loss = slope(model, 0.25)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    backward(loss, optimizer)
    assert grads(optimizer) == [0.5]


# -- several losses and optimizers -----------------------------------------------------------


def test_each_loss_id_has_its_own_scale_and_losses_add_up():
    model, optimizer = one_weight("O2", num_losses=3)
    for loss_id, value in enumerate((0.5, 0.25, torch.inf)):
        backward(slope(model, value), optimizer, loss_id=loss_id)
        if loss_id == 1:
            assert grads(optimizer) == [0.75]
    assert [scale(index) for index in range(3)] == [2.0**16, 2.0**16, 2.0**15]
    optimizer.step()
    assert model.weight == 1.0


def test_an_overflow_skips_the_step_of_every_optimizer_given_with_the_loss():
    model = Net()
    optimizers = [sgd(model.first), sgd(model.last)]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    backward(loss_of(model) + model.last.weight.sum() * torch.inf, tuple(optimizers))
    for optimizer in optimizers:
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_the_newest_session_of_the_optimizers_scales():
    optimizers = [prepared("O2", loss_scale=scale)[1] for scale in (8.0, 4.0, 2.0)]
    for which, factor in (((0,), 8.0), ((0, 1), 4.0), ((1, 0), 4.0), ((0, 2, 1), 2.0)):
        loss = torch.ones((), requires_grad=True)
        with amp.scale_loss(loss, [optimizers[i] for i in which]) as scaled_loss:
            assert scaled_loss == factor


# -- inside the block ------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("given", [None, 8.0, "dynamic"])
def test_a_step_inside_the_block_steps_by_unscaled_gradients(level, given):
    model, optimizer = one_weight(level, loss_scale=given)
    with amp.scale_loss(slope(model, 0.5), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert model.weight == 0.9375


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_the_block_is_skipped_on_overflow_and_moves_the_scale_once(level):
    model, optimizer = one_weight(level)
    with amp.scale_loss(slope(model, torch.inf), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert (model.weight, scale(), unskipped()) == (1.0, 2.0**15, 0)


def fail(loss, optimizer, *, backward_first):
    def block():
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            if backward_first:
                scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        block()


@levels
@pytest.mark.parametrize("late", [False, True], ids=["before backward", "after backward"])
def test_an_exception_inside_leaves_the_next_block_usable(level, late):
    model, optimizer = one_weight(level, loss_scale="dynamic")
    fail(slope(model, torch.inf), optimizer, backward_first=late)
    assert (scale(), unskipped()) == (2.0**16, 0)
    backward(slope(model, 0.5), optimizer)
    optimizer.step()
    assert model.weight == 0.9375


# -- refusals --------------------------------------------------------------------------------


def test_before_initialize_the_error_shows_the_call():
    model = Net()
    optimizer = sgd(model)
    words = r"before amp\.initialize.*\n.*model, optimizer = amp\.initialize\(model, optimizer, opt"
    for given in (optimizer, []):
        with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
            amp.scale_loss(torch.ones(()), given)


@levels
def test_an_optimizer_that_amp_has_not_prepared_is_refused_with_the_call(level):
    model, optimizer = prepared(level)
    loss = loss_of(model)
    words = rf"no optimizer that amp has prepared\. Pass it(?s:.*)opt_level='{level}'"
    for given in (sgd(Net()), [optimizer, sgd(Net())]):
        with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
            amp.scale_loss(loss, given)
    words = r"returns a context(?s:.*)with amp\.scale_loss\(loss, optimizer\) as scaled_loss"
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(loss, optimizer).backward()


@pytest.mark.parametrize(
    ("error", "loss", "options", "words"),
    [
        (TypeError, 1.0, {}, "loss of type float; it must be a tensor"),
        (TypeError, [torch.ones(())], {}, "loss of type list; it must be a tensor"),
        (
            TypeError,
            torch.ones((), dtype=torch.int64),
            {},
            "dtype torch.int64; it must have",
        ),
        (TypeError, torch.ones((), dtype=torch.complex64), {}, "a real floating-point dtype"),
        (TypeError, torch.ones(()), {"loss_id": "gan"}, "loss_id is 'gan'; it must be an integer"),
        (IndexError, torch.ones(()), {"loss_id": 2}, r"2, but this .* made 2 .* num_losses=3"),
        (IndexError, torch.ones(()), {"loss_id": -3}, r"-3, but this .* num_losses=3 to amp\."),
        (TypeError, torch.ones(()), {"optimizers": Net()}, "got Net instead of an optimizer"),
    ],
)
def test_bad_arguments_are_refused(error, loss, options, words):
    model, optimizer = prepared("O2", num_losses=2)
    given = {"optimizers": optimizer, **options}
    with nothing_changes(model, optimizer), pytest.raises(error, match=words):
        amp.scale_loss(loss, **given)
