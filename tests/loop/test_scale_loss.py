"""A ``scale_loss`` block: what it accepts and yields, and what may happen inside it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops
from tests.support.reference.plain_loops import Loop


def grads(optimizer):
    return [p.grad.item() for p in amp.master_params(optimizer)]


@loops.every(dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64], shape=[(), (1,)])
def test_a_loss_of_any_floating_dtype_is_scaled_in_fp32_at_least(dtype, shape):
    model, optimizer = loops.one_weight("O2", loss_scale=8.0)
    loss = loops.slope(model, 3.0).to(dtype).reshape(shape)
    with amp.scale_loss(loss, optimizer, model=model) as scaled_loss:
        assert (scaled_loss.shape, scaled_loss.item()) == (shape, 24.0)
        assert scaled_loss.dtype is torch.promote_types(dtype, torch.float32)
        scaled_loss.backward()
    assert grads(optimizer) == [3.0]


@pytest.mark.parametrize("level", loops.LEVELS)
def test_gradients_are_unscaled_after_the_block_and_of_the_stepped_dtype(level):
    model, optimizer = loops.one_weight(level, loss_scale=8.0)
    loops.scaled_backward(loops.slope(model, 3.0), [optimizer, optimizer])  # counts once
    (param,) = amp.master_params(optimizer)
    assert (param.grad.item(), param.grad.dtype) == (3.0, param.dtype)


def test_scale_1_gives_the_loss_itself_and_an_empty_list_only_scales():
    model, optimizer = loops.one_weight("O1", loss_scale=1.0)
    loss = loops.slope(model, 1.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == loss
    model, _ = loops.one_weight("O1")
    loops.scaled_backward(loops.slope(model, 1.0), [])
    assert model.weight.grad == 2.0**16


def test_a_delayed_overflow_check_leaves_the_scale_to_the_next_pass():
    model, optimizer = loops.one_weight("O1")
    for delays, counted in ((True, 0), (False, 1)):
        loss = loops.slope(model, 3.0)
        loops.scaled_backward(loss, optimizer, delay_overflow_check=delays)
        assert loops.unskipped() == counted


def test_a_negative_loss_id_counts_from_the_last_loss():
    model, optimizer = loops.one_weight("O1", num_losses=2)
    loops.scaled_backward(loops.slope(model, torch.inf), optimizer, loss_id=-1)
    assert [loops.scale(0), loops.scale(1)] == [2.0**16, 2.0**15]


@pytest.mark.parametrize("level", loops.LEVELS)
def test_a_loss_without_a_graph_is_scaled_and_its_backward_fails_in_torch_s_words(level):
    model, optimizer = loops.one_weight(level, loss_scale=8.0)
    with torch.no_grad():
        loss = loops.slope(model, 3.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == 24.0
    with pytest.raises(RuntimeError, match="does not require grad"):
        loops.scaled_backward(loss, optimizer)
    assert optimizer.step() is None


@pytest.mark.parametrize("of", [lambda named: named.values(), lambda named: {*named.values()}])
def test_optimizers_come_in_any_collection_as_in_apex(of):
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    named = {str(i): loops.sgd(model.parameters()) for i, model in enumerate(models)}
    amp.initialize(models, [*named.values()], opt_level="O1", verbosity=0)
    loops.scaled_backward(sum(loops.slope(model, 3.0) for model in models), of(named))
    assert [model.weight.grad.item() for model in models] == [3.0, 3.0]


def test_an_fp16_loss_overflows_at_the_first_scale_and_then_trains():
    model, optimizer = loops.one_weight("O1")
    for weight in (1.0, 0.875):
        loops.descend(model.weight.sum().half(), optimizer)
        assert (model.weight, loops.loss_scale()) == (weight, 2.0**15)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_loss_whose_own_backward_scales_it_takes_part_once(level):
    model, optimizer = loops.one_weight(level)
    loss = loops.slope(model, 1.0)

    def own_backward():
        loops.scaled_backward(loss, optimizer)

    loss.backward = own_backward
    loss.backward()
    assert grads(optimizer) == [1.0]


@pytest.mark.parametrize("delay", [False, True])
def test_no_loss_is_kept_after_the_step(delay):
    model, optimizer = loops.prepared("O2")
    loss = loops.loss_of(model, *loops.batch())
    seen = weakref.ref(loss)
    loops.scaled_backward(loss, optimizer, delay_unscale=delay)
    del loss
    optimizer.step()
    gc.collect()
    assert seen() is None


def test_retain_graph_backs_twice_through_one_graph(level):
    model, optimizer = loops.one_weight(level)
    loss = loops.slope(model, 0.25)
    for retain in (True, False):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=retain)
    assert grads(optimizer) == [0.5]


# -- casts -----------------------------------------------------------------------------------


@loops.every(level=["O1", "O4"], in_thread=[False, True])
def test_inside_the_block_casts_are_those_around_it(level, in_thread):
    low = loops.LEVELS[level].compute
    model, optimizer = loops.prepared(level)
    x, y = loops.batch()
    dtypes = []

    def work():
        with amp.scale_loss(loops.loss_of(model, x, y), optimizer) as scaled_loss:
            dtypes.append((model(x).dtype, (x @ x.t()).dtype))
            scaled_loss.backward()
            dtypes.append((model(x).dtype, (x @ x.t()).dtype))

    loops.in_a_thread(work) if in_thread else work()
    assert dtypes == [(low, torch.float32 if in_thread else low)] * 2


# -- double backward and checkpoints ---------------------------------------------------------


def penalty(model, x):
    (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    return (slope.norm() - 1).square()


@pytest.mark.parametrize("form", ["around", "inside"])
def test_a_gradient_penalty_trains_through_double_backward(level, form):
    model, optimizer = loops.prepared(level, loss_scale=128.0)
    x = loops.batch()[0].requires_grad_()
    if form == "around":
        loss = penalty(model, x)
    else:
        output = model(x).float().sum()
        with amp.scale_loss(output, optimizer) as scaled_loss:
            (slope,) = torch.autograd.grad(scaled_loss, x, create_graph=True)
            loss = ((slope / (scaled_loss / output)).norm() - 1).square()
    loops.scaled_backward(loss, optimizer)
    plain = loops.net()
    penalty(plain, x).backward()
    eps = 16 * torch.finfo(loops.LEVELS[level].compute).eps
    found = next(iter(amp.master_params(optimizer))).grad
    torch.testing.assert_close(found, plain[0].weight.grad, rtol=eps, atol=eps)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
def test_gradients_of_a_block_with_a_graph_train_through_double_backward(level, scale):
    model, optimizer = loops.prepared(level, loss_scale=scale, max_loss_scale=128.0)
    for _ in range(2):
        with amp.scale_loss(loops.loss_of(model, *loops.batch()), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
    params = list(amp.master_params(optimizer))
    loss = sum(param.grad.float().square().sum() for param in params)
    optimizer.zero_grad()
    loops.scaled_backward(loss, optimizer)
    plain = loops.net()
    loss = 2 * loops.loss_of(plain, *loops.batch())
    grads = torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    eps = 64 * torch.finfo(loops.LEVELS[level].compute).eps
    for stepped, param in zip(params, plain.parameters(), strict=True):
        bound = eps * param.grad.abs().max()
        torch.testing.assert_close(stepped.grad.float(), param.grad, rtol=eps, atol=bound)


# -- exceptions ------------------------------------------------------------------------------


def fail(model, optimizer, *, early=False, clears=False, **options):
    """A block that ends with an exception."""

    def block():
        loss = loops.loss_of(model, *loops.overflowing())
        with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
            if clears:
                optimizer.zero_grad()
            if not early:
                scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        block()


EXITS = [(level, True) for level in loops.LEVELS_SHORT] + [("O1", False), ("O2", False)]


@pytest.mark.parametrize(("level", "early"), EXITS)
def test_after_an_exception_inside_all_goes_on_as_if_nothing_had_happened(level, early):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS["Adam"])
    loop = Loop(level, loops.net().parameters(), loops.OPTIMIZERS["Adam"])
    for first, second in zip(loops.batches(3), loops.batches(3, seed=2), strict=True):
        optimizer.zero_grad()
        loop.zero_grad()
        for x, y in (first, second):
            loops.backward(model, optimizer, x, y)
            loop.backward(x, y)
            fail(model, optimizer, early=early)
        optimizer.step()
        loop.step()
    assert loops.same(loops.masters(optimizer), loop.stepped)
    assert loops.loss_scale() == loop.scale
    if level == "O1":
        assert loops.product() is torch.float16


def test_an_exception_after_zero_grad_inside_the_block_leaves_no_gradients(level):
    model, optimizer = loops.prepared(level, loss_scale=128.0)
    loops.backward(model, optimizer, *loops.batch())
    fail(model, optimizer, clears=True)
    found = loops.grads([*model.parameters(), *amp.master_params(optimizer)])
    assert found == [None] * len(found)


@pytest.mark.parametrize("level", loops.MIXED)
def test_zero_grad_inside_the_block_also_clears_what_no_optimizer_steps(level):
    model, factors = loops.Weights(), {"a": 1.0, "b": 2.0}
    optimizer = loops.sgd([model.a])
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(**factors), optimizer) as scaled_loss:
            model.zero_grad()
            scaled_loss.backward()
    assert [param.grad[0].item() for param in model.parameters()] == [1.0, 2.0]


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_what_no_optimizer_steps_adds_up_in_fp32_also_in_another_session(level):
    held = loops.Weights()
    amp.initialize(held, loops.sgd([held.a]), opt_level=level, verbosity=0)
    model, optimizer = loops.prepared(level, model=loops.Weights(), loss_scale=8.0)
    for factor in (4096.0, 0.5):
        loops.scaled_backward(held(b=factor) + model(a=1.0), optimizer)
    assert held.b.grad.tolist() == [4096.5] * 2


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("after_delay", [False, True])
def test_a_block_inside_another_of_the_same_optimizer_is_refused(level, after_delay):
    model, optimizer = loops.prepared(level)
    if after_delay:
        loops.backward(model, optimizer, *loops.batch(), delay_unscale=True)
    loss = loops.loss_of(model, *loops.batch())
    inner = amp.scale_loss(loss, optimizer)
    refused = pytest.raises(RuntimeError, match="entered inside another")
    with amp.scale_loss(loss, optimizer), refused:
        inner.__enter__()
    loops.scaled_backward(loss, optimizer)
    optimizer.step()


def test_a_context_is_of_one_pass(level):
    model, optimizer = loops.prepared(level, loss_scale=128.0)
    block = amp.scale_loss(loops.small_loss(model), optimizer)
    with block as scaled_loss:
        scaled_loss.backward()
    before = loops.grads(model.parameters())
    with pytest.raises(RuntimeError, match="Call it anew for each pass"):
        block.__enter__()
    assert loops.same(loops.grads(model.parameters()), before)
    optimizer.step()


def test_before_initialize_the_error_shows_the_call():
    model, optimizer = loops.plain_pair()
    words = r"before amp\.initialize.*\n.*model, optimizer = amp\.initialize\(model, optimizer, opt"
    for given in (optimizer, []):
        with loops.nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
            amp.scale_loss(torch.ones(()), given)


def test_an_optimizer_that_amp_has_not_prepared_is_refused_with_the_call(level):
    model, optimizer = loops.prepared(level)
    loss, other = loops.loss_of(model, *loops.batch()), loops.sgd(loops.net().parameters())
    words = rf"has prepared; copies of these are plain\. Pass yours(?s:.*)opt_level='{level}'"
    for given in (other, [optimizer, other]):
        with loops.nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
            amp.scale_loss(loss, given)
    words = r"returns a context(?s:.*)with amp\.scale_loss\(loss, optimizer\) as scaled_loss"
    with loops.nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(loss, optimizer).backward()


ONE = torch.ones(())


BAD_ARGUMENTS = [
    (TypeError, 1.0, {}, "loss of type float; it must be a tensor"),
    (TypeError, [ONE], {}, "loss of type list; it must be a tensor"),
    (TypeError, ONE.long(), {}, "dtype torch.int64; it must have"),
    (TypeError, ONE.cfloat(), {}, "a real floating-point dtype"),
    (IndexError, ONE, {"loss_id": 2}, r"2, but .* num_losses=2\. .* num_losses=3 to amp\."),
    (IndexError, ONE, {"loss_id": -3}, r"-3, but .* num_losses=2\. .* num_losses=3 to amp\."),
    (TypeError, ONE, {"optimizers": nn.Linear(1, 1)}, "got Linear instead of an optimizer"),
    (TypeError, ONE, {"optimizers": torch.ones(())}, "got Tensor instead of an optimizer"),
]


@pytest.mark.parametrize(("error", "loss", "options", "words"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(error, loss, options, words):
    model, optimizer = loops.prepared("O2", num_losses=2)
    given = {"optimizers": optimizer, **options}
    with loops.nothing_changes(model, optimizer), pytest.raises(error, match=words):
        amp.scale_loss(loss, **given)
