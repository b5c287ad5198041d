"""A ``scale_loss`` block: what it accepts and yields, and what may happen inside it."""

import gc
import inspect
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from tests.support import training as t
from tests.support.reference.loops import Loop
from tests.support.steps import nothing_changes, one_weight, slope

levels = pytest.mark.parametrize("level", t.LEVELS_SHORT)
casting = pytest.mark.parametrize("level", ["O1", "O4"])


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_of_any_floating_dtype_is_scaled_in_fp32_at_least(dtype, shape):
    model, optimizer = one_weight("O2", loss_scale=8.0)
    loss = slope(model, 3.0).to(dtype).reshape(shape)
    with amp.scale_loss(loss, optimizer, model=model) as scaled_loss:
        assert (scaled_loss.shape, scaled_loss.item()) == (shape, 24.0)
        assert scaled_loss.dtype is torch.promote_types(dtype, torch.float32)
        scaled_loss.backward()
    assert grads(optimizer) == [3.0]


@pytest.mark.parametrize("level", t.LEVELS)
def test_gradients_are_unscaled_after_the_block_and_of_the_stepped_dtype(level):
    model, optimizer = one_weight(level, loss_scale=8.0)
    with amp.scale_loss(slope(model, 3.0), [optimizer, optimizer]) as scaled_loss:  # counts once
        scaled_loss.backward()
    (param,) = amp.master_params(optimizer)
    assert (param.grad.item(), param.grad.dtype) == (3.0, param.dtype)


def test_scale_1_gives_the_loss_itself_and_an_empty_list_only_scales():
    model, optimizer = one_weight("O1", loss_scale=1.0)
    loss = slope(model, 1.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == loss
    model, _ = one_weight("O1")
    with amp.scale_loss(slope(model, 1.0), []) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad == 2.0**16


def test_an_fp16_loss_overflows_at_the_first_scale_and_then_trains():
    model, optimizer = one_weight("O1")
    for weight in (1.0, 0.875):
        with amp.scale_loss(model.weight.sum().half(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (model.weight, t.loss_scale()) == (weight, 2.0**15)


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
    model, optimizer = t.prepared("O2")
    loss = t.loss_of(model, *t.batch())
    seen = weakref.ref(loss)
    with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
        scaled_loss.backward()
    del loss, scaled_loss
    optimizer.step()
    gc.collect()
    assert seen() is None


@levels
def test_retain_graph_backs_twice_through_one_graph(level):
    model, optimizer = one_weight(level)
    loss = slope(model, 0.25)
    for retain in (True, False):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=retain)
    assert grads(optimizer) == [0.5]


@pytest.mark.parametrize("level", t.WITH_MASTERS)
def test_a_loss_on_the_masters_themselves_gives_unscaled_gradients(level):
    _, optimizer = t.prepared(level, loss_scale=8.0)
    master = next(amp.master_params(optimizer))
    with amp.scale_loss(0.5 * master.pow(2).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(master.grad, master.detach())


# -- casts -----------------------------------------------------------------------------------


@casting
@pytest.mark.parametrize("in_thread", [False, True])
def test_inside_the_block_casts_are_those_around_it(level, in_thread):
    low = t.LEVELS[level].compute
    model, optimizer = t.prepared(level)
    x, y = t.batch()
    dtypes = []

    def work():
        with amp.scale_loss(t.loss_of(model, x, y), optimizer) as scaled_loss:
            dtypes.append((model(x).dtype, (x @ x.t()).dtype))
            scaled_loss.backward()
            dtypes.append((model(x).dtype, (x @ x.t()).dtype))

    thread = threading.Thread(target=work)
    (thread.start if in_thread else work)()
    if in_thread:
        thread.join()
    assert dtypes == [(low, torch.float32 if in_thread else low)] * 2


# -- double backward and checkpoints ---------------------------------------------------------


def penalty(model, x):
    (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    return (slope.norm() - 1).square()


@pytest.mark.parametrize("form", ["around", "inside"])
@levels
def test_a_gradient_penalty_trains_through_double_backward(level, form):
    model, optimizer = t.prepared(level, loss_scale=128.0)
    x = t.batch()[0].requires_grad_()
    if form == "around":
        loss = penalty(model, x)
    else:
        output = model(x).float().sum()
        with amp.scale_loss(output, optimizer) as scaled_loss:
            (slope,) = torch.autograd.grad(scaled_loss, x, create_graph=True)
            loss = ((slope / (scaled_loss / output)).norm() - 1).square()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    plain = t.net()
    penalty(plain, x).backward()
    eps = 16 * torch.finfo(t.LEVELS[level].compute).eps
    found = next(iter(amp.master_params(optimizer))).grad
    torch.testing.assert_close(found, plain[0].weight.grad, rtol=eps, atol=eps)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@levels
def test_gradients_of_a_block_with_a_graph_train_through_double_backward(level, scale):
    model, optimizer = t.prepared(level, loss_scale=scale, max_loss_scale=128.0)
    for _ in range(2):
        with amp.scale_loss(t.loss_of(model, *t.batch()), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
    params = list(amp.master_params(optimizer))
    loss = sum(param.grad.float().square().sum() for param in params)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    plain = t.net()
    loss = 2 * t.loss_of(plain, *t.batch())
    grads = torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    eps = 64 * torch.finfo(t.LEVELS[level].compute).eps
    for stepped, param in zip(params, plain.parameters(), strict=True):
        bound = eps * param.grad.abs().max()
        torch.testing.assert_close(stepped.grad.float(), param.grad, rtol=eps, atol=bound)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.net, self.use_reentrant = t.net(), use_reentrant

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@levels
def test_checkpointed_layers_give_the_gradients_of_plain_ones(level, use_reentrant):
    x, y = t.batch()
    x.requires_grad_()
    found = []
    for net in (t.net(), Checkpointed(use_reentrant)):
        model, optimizer = t.prepared(level, model=net)
        t.backward(model, optimizer, x, y)
        found.append(t.grads(amp.master_params(optimizer)))
    assert t.same(*found)


# -- exceptions ------------------------------------------------------------------------------


def fail(model, optimizer, *, early=False, clears=False, **options):
    """A block that ends with an exception."""

    def block():
        loss = t.loss_of(model, *t.overflowing())
        with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
            if clears:
                optimizer.zero_grad()
            if not early:
                scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        block()


@pytest.mark.parametrize("early", [True, False])
@levels
def test_after_an_exception_inside_all_goes_on_as_if_nothing_had_happened(level, early):
    model, optimizer = t.prepared(level, t.OPTIMIZERS["Adam"])
    loop = Loop(level, t.net().parameters(), t.OPTIMIZERS["Adam"])
    for first, second in zip(t.batches(3), t.batches(3, seed=2), strict=True):
        optimizer.zero_grad()
        loop.zero_grad()
        for x, y in (first, second):
            t.backward(model, optimizer, x, y)
            loop.backward(x, y)
            fail(model, optimizer, early=early)
        optimizer.step()
        loop.step()
    assert t.same(t.masters(optimizer), loop.stepped)
    assert t.loss_scale() == loop.scale
    if level == "O1":
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


@levels
def test_an_exception_after_zero_grad_inside_the_block_leaves_no_gradients(level):
    model, optimizer = t.prepared(level, loss_scale=128.0)
    t.backward(model, optimizer, *t.batch())
    fail(model, optimizer, clears=True)
    found = t.grads([*model.parameters(), *amp.master_params(optimizer)])
    assert found == [None] * len(found)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_second_of_two_delayed_passes_leaves_the_first_to_the_step(level):
    pairs = [t.prepared(level, loss_scale=8.0) for _ in range(2)]
    for pair in pairs:
        t.backward(*pair, *t.batch(), delay_unscale=True)
    with pytest.warns(match=r"An exception ended"):
        fail(*pairs[0], early=True, delay_unscale=True)
    for _, optimizer in pairs:
        optimizer.step()
    assert t.same(*(t.masters(optimizer) for _, optimizer in pairs))


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("after_delay", [False, True])
@levels
def test_a_block_inside_another_of_the_same_optimizer_is_refused(level, after_delay):
    model, optimizer = t.prepared(level)
    if after_delay:
        t.backward(model, optimizer, *t.batch(), delay_unscale=True)
    loss = t.loss_of(model, *t.batch())
    inner = amp.scale_loss(loss, optimizer)
    with (
        amp.scale_loss(loss, optimizer) as scaled_loss,
        pytest.raises(RuntimeError, match="entered inside another"),
    ):
        inner.__enter__()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def test_before_initialize_the_error_shows_the_call():
    model = t.net()
    optimizer = t.sgd(model.parameters())
    words = r"before amp\.initialize.*\n.*model, optimizer = amp\.initialize\(model, optimizer, opt"
    for given in (optimizer, []):
        with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
            amp.scale_loss(torch.ones(()), given)


@levels
def test_an_optimizer_that_amp_has_not_prepared_is_refused_with_the_call(level):
    model, optimizer = t.prepared(level)
    loss, other = t.loss_of(model, *t.batch()), t.sgd(t.net().parameters())
    words = rf"no optimizer that amp has prepared\. Pass it(?s:.*)opt_level='{level}'"
    for given in (other, [optimizer, other]):
        with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
            amp.scale_loss(loss, given)
    words = r"returns a context(?s:.*)with amp\.scale_loss\(loss, optimizer\) as scaled_loss"
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(loss, optimizer).backward()


ONE = torch.ones(())


@pytest.mark.parametrize(
    ("error", "loss", "options", "words"),
    [
        (TypeError, 1.0, {}, "loss of type float; it must be a tensor"),
        (TypeError, [ONE], {}, "loss of type list; it must be a tensor"),
        (TypeError, ONE.long(), {}, "dtype torch.int64; it must have"),
        (TypeError, ONE.cfloat(), {}, "a real floating-point dtype"),
        (TypeError, ONE, {"loss_id": "gan"}, "loss_id is 'gan'; it must be an integer"),
        (IndexError, ONE, {"loss_id": 2}, r"2, but this .* made 2 .* num_losses=3"),
        (IndexError, ONE, {"loss_id": -3}, r"-3, but this .* num_losses=3 to amp\."),
        (TypeError, ONE, {"optimizers": nn.Linear(1, 1)}, "got Linear instead of an optimizer"),
    ],
)
def test_bad_arguments_are_refused(error, loss, options, words):
    model, optimizer = t.prepared("O2", num_losses=2)
    given = {"optimizers": optimizer, **options}
    with nothing_changes(model, optimizer), pytest.raises(error, match=words):
        amp.scale_loss(loss, **given)
