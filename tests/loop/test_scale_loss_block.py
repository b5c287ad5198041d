"""What may happen inside and after one ``scale_loss`` block."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from tests.support import training as cases
from tests.support.reference.loops import Loop


@pytest.mark.parametrize("level", cases.LEVELS)
def test_clipping_master_params_after_the_block_equals_the_plain_loop(level):
    model, optimizer = cases.prepared(level)
    loop = Loop(level, cases.net().parameters(), cases.sgd)
    x, y = cases.batch()
    cases.backward(model, optimizer, x, y)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    optimizer.step()
    loop.backward(x, y)
    norm_by_hand = nn.utils.clip_grad_norm_(loop.stepped, 0.1)
    loop.optimizer.step()
    assert norm > 0.1
    assert cases.same(norm, norm_by_hand)
    assert cases.same(cases.masters(optimizer), loop.stepped)


@pytest.mark.parametrize("level", cases.MIXED)
def test_retain_graph_lets_a_second_block_go_through_the_same_graph(level):
    model, optimizer = cases.prepared(level)
    loss = cases.loss_of(model, *cases.batch())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    once = cases.grads(amp.master_params(optimizer))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert cases.same([2 * grad for grad in once], cases.grads(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_ops_and_models_inside_the_block_are_cast_as_around_it(level):
    low = cases.LEVELS[level].compute
    model, optimizer = cases.prepared(level)
    x, y = cases.batch()
    with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
        assert model(x).dtype is (x @ x.t()).dtype is low
        scaled_loss.backward()
        assert model(x).dtype is (x @ x.t()).dtype is low


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_in_a_thread_without_casts_so_are_models_inside_the_block(level):
    model, optimizer = cases.prepared(level)
    x, y = cases.batch()
    dtypes = []

    def work():
        with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
            scaled_loss.backward()
            dtypes.extend([model(x).dtype, (x @ x.t()).dtype])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dtypes == [cases.LEVELS[level].compute, torch.float32]


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_zero_grad_and_a_step_inside_the_block_equal_those_around_it(level, clear):
    inside, around = (cases.prepared(level, loss_scale=128.0) for _ in range(2))
    for x, y in cases.batches(2):
        cases.train_step(*around, x, y)
        model, optimizer = inside
        with amp.scale_loss(cases.loss_of(model, x, y), optimizer) as scaled_loss:
            (optimizer if clear == "optimizer" else model).zero_grad()
            scaled_loss.backward()
            optimizer.step()
    assert cases.same(list(inside[0].parameters()), list(around[0].parameters()))
    assert cases.same(cases.masters(inside[1]), cases.masters(around[1]))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_exception_after_zero_grad_inside_the_block_leaves_no_scaled_gradients(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    cases.backward(model, optimizer, *cases.batch())

    def fails():
        with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
            optimizer.zero_grad()
            scaled_loss.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    grads = cases.grads([*model.parameters(), *amp.master_params(optimizer)])
    assert grads == [None] * len(grads)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_the_block_is_skipped_on_overflow(level):
    model, optimizer = cases.prepared(level)
    before = cases.values(model.parameters())
    with amp.scale_loss(cases.loss_of(model, *cases.overflowing()), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert cases.same(before, cases.values(model.parameters()))
    assert cases.loss_scale() == 2.0**15


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_gradient_penalty_trains_through_double_backward(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    x, _ = cases.batch()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    penalty = (slope.norm() - 1).square()
    with amp.scale_loss(penalty, optimizer) as scaled_loss:
        scaled_loss.backward()
    expected = _penalty_gradient(x)
    weight = next(iter(amp.master_params(optimizer)))
    eps = torch.finfo(cases.LEVELS[level].compute).eps
    torch.testing.assert_close(weight.grad.float(), expected, rtol=16 * eps, atol=16 * eps)


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_gradient_taken_in_one_block_trains_in_the_next_through_double_backward(level):
    model, optimizer = cases.prepared(level, loss_scale="dynamic", max_loss_scale=128.0)
    x, _ = cases.batch()
    x.requires_grad_()
    loss = model(x).float().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        (slope,) = torch.autograd.grad(scaled_loss, x, create_graph=True)
        slope = slope / (scaled_loss / loss)
    with amp.scale_loss((slope.norm() - 1).square(), optimizer) as scaled_loss:
        scaled_loss.backward()
    weight = next(iter(amp.master_params(optimizer)))
    eps = torch.finfo(cases.LEVELS[level].compute).eps
    torch.testing.assert_close(
        weight.grad.float(), _penalty_gradient(x), rtol=16 * eps, atol=16 * eps
    )


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_gradients_of_a_block_with_a_graph_train_through_double_backward(level, scale, passes):
    model, optimizer = cases.prepared(level, loss_scale=scale, max_loss_scale=128.0)
    for _ in range(passes):
        with amp.scale_loss(cases.loss_of(model, *cases.batch()), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
    params = list(amp.master_params(optimizer))
    penalty = sum(param.grad.float().square().sum() for param in params)
    optimizer.zero_grad()
    with amp.scale_loss(penalty, optimizer) as scaled_loss:
        scaled_loss.backward()

    plain = cases.net()
    grads = torch.autograd.grad(
        passes * cases.loss_of(plain, *cases.batch()), list(plain.parameters()), create_graph=True
    )
    sum(grad.square().sum() for grad in grads).backward()
    eps = torch.finfo(cases.LEVELS[level].compute).eps
    for stepped, param in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(
            stepped.grad.float(), param.grad, rtol=64 * eps, atol=64 * eps * param.grad.abs().max()
        )


def _penalty_gradient(x):
    model = cases.net()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad((slope.norm() - 1).square(), model[0].weight)[0]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_checkpointed_layers_give_the_gradients_of_plain_ones(level, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = cases.net()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=use_reentrant)

    x, y = cases.batch()
    x.requires_grad_()
    plain, plain_optimizer = cases.prepared(level)
    cases.backward(plain, plain_optimizer, x, y)
    model, optimizer = cases.prepared(level, model=Checkpointed())
    cases.backward(model, optimizer, x, y)
    assert cases.same(
        cases.grads(amp.master_params(plain_optimizer)), cases.grads(amp.master_params(optimizer))
    )


class Interrupted(Exception):
    pass


def interrupted_block(model, optimizer, **options):
    def block():
        loss = cases.loss_of(model, *cases.batch(7))
        with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
            scaled_loss.backward()
            raise Interrupted

    with pytest.raises(Interrupted):
        block()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_exception_inside_leaves_the_gradients_from_before(level):
    model, optimizer = cases.prepared(level)
    cases.backward(model, optimizer, *cases.batch())
    before = cases.grads(amp.master_params(optimizer))
    interrupted_block(model, optimizer)
    assert cases.same(before, cases.grads(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_after_an_exception_inside_training_goes_on_as_if_nothing_had_happened(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    loop = Loop(level, cases.net().parameters(), cases.OPTIMIZERS["Adam"])
    for x, y in cases.batches(3):
        cases.train_step(model, optimizer, x, y)
        loop.train_step(x, y)
        interrupted_block(model, optimizer)
    assert cases.same(cases.masters(optimizer), loop.stepped)
    assert cases.loss_scale() == loop.scale


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_after_an_exception_inside_ops_are_cast_again(level):
    model, optimizer = cases.prepared(level)
    interrupted_block(model, optimizer)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is cases.LEVELS[level].compute


class BrokenLoss(torch.Tensor):
    """A loss that cannot be multiplied: scaling it fails when the block is entered."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "mul" in func.__name__:
            raise Interrupted
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_precision_loss_is_scaled_in_fp32(dtype):
    model, optimizer = cases.prepared("O1")
    loss = cases.loss_of(model, *cases.batch()).to(dtype)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.dtype is torch.float32
        assert torch.equal(scaled_loss, loss.float() * 2.0**16)


def test_a_double_loss_stays_double():
    model, optimizer = cases.prepared("O1")
    with amp.scale_loss(cases.loss_of(model, *cases.batch()).double(), optimizer) as scaled_loss:
        assert scaled_loss.dtype is torch.float64


@pytest.mark.parametrize("level", cases.MIXED)
def test_a_loss_of_one_element_trains_like_a_0d_one(level):
    trained = []
    for shape in ((), (1,)):
        model, optimizer = cases.prepared(level)
        loss = cases.loss_of(model, *cases.batch()).reshape(shape)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        trained.append(cases.masters(optimizer))
    assert cases.same(*trained)


def test_an_empty_list_of_optimizers_only_scales():
    model, optimizer = cases.prepared("O1")
    loss = cases.loss_of(model, *cases.batch())
    with amp.scale_loss(loss, []) as scaled_loss:
        scaled_loss.backward()
    scaled = cases.grads(model.parameters())
    optimizer.zero_grad()
    cases.backward(model, optimizer, *cases.batch())
    assert cases.same([grad / 2.0**16 for grad in scaled], cases.grads(model.parameters()))


@pytest.mark.parametrize("after_delay", [False, True])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_block_inside_another_of_the_same_optimizer_is_refused(level, after_delay):
    model, optimizer = cases.prepared(level)
    if after_delay:
        cases.backward(model, optimizer, *cases.batch(), delay_unscale=True)
    loss = cases.loss_of(model, *cases.batch())
    inner = amp.scale_loss(loss, optimizer)
    with (
        amp.scale_loss(loss, optimizer) as scaled_loss,
        pytest.raises(RuntimeError, match="entered inside another"),
    ):
        inner.__enter__()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_loss_on_the_masters_themselves_gives_unscaled_gradients(level):
    _, optimizer = cases.prepared(level, loss_scale=8.0)
    master = next(amp.master_params(optimizer))
    with amp.scale_loss(0.5 * master.pow(2).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(master.grad, master.detach())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_second_of_two_delayed_passes_leaves_the_first_to_the_step(level):
    stopped, alone = (cases.prepared(level, loss_scale=8.0) for _ in range(2))
    x, y = cases.batch()
    for model, optimizer in (stopped, alone):
        cases.backward(model, optimizer, x, y, delay_unscale=True)
    loss = cases.loss_of(stopped[0], x, y)
    with pytest.raises(KeyError), amp.scale_loss(loss, stopped[1], delay_unscale=True):
        raise KeyError
    for _, optimizer in (stopped, alone):
        optimizer.step()
    assert cases.same(list(stopped[0].parameters()), list(alone[0].parameters()))
