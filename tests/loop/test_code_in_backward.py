"""Python code inside a backward pass: mixed dtypes are resolved, all else is left as it comes."""

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases

CASTING = pytest.mark.parametrize("level", ["O1", "O4"])
PASSES = pytest.mark.parametrize("where", ["scale_loss", "plain"])


def around(loss, optimizer, where):
    return (
        amp.scale_loss(loss, optimizer) if where == "scale_loss" else contextlib.nullcontext(loss)
    )


class Mixing(nn.Module):
    """A linear layer whose function has a backward of its own, which mixes dtypes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return Product.apply(self.first(x), self.weight)


class Product(torch.autograd.Function):
    dtypes = ()

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grads = grad @ weight.t(), x.float().t() @ grad
        Product.dtypes = [grad.dtype, *(g.dtype for g in grads), (grad.float() @ weight).dtype]
        return grads


@PASSES
@CASTING
def test_a_function_s_own_backward_may_mix_dtypes(level, where):
    low = cases.LEVELS[level].compute
    model, optimizer = cases.prepared(level, model=Mixing(), loss_scale=1.0)
    x = torch.randn(3, 4)
    loss = model(x).float().pow(2).mean()
    with around(loss, optimizer, where) as scaled_loss:
        scaled_loss.backward()
    # Outside of scale_loss the pass runs under its thread's casts, as in apex.
    last = torch.float32 if where == "scale_loss" else low
    assert Product.dtypes == [low, low, low, last]
    plain = Mixing()
    plain.load_state_dict(model.state_dict())
    plain(x).pow(2).mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05)


@CASTING
def test_gradients_of_a_loss_under_disable_casts_are_those_of_fp32(level):
    torch.manual_seed(0)
    model, optimizer = cases.prepared(level, loss_scale=1.0)
    head, x = nn.Linear(2, 1), torch.randn(3, 2)

    def grads(around_loss, where):
        head.zero_grad()
        with around_loss:
            loss = head(x).pow(2).sum()
        with around(loss, optimizer, where) as scaled_loss:
            scaled_loss.backward()
        return [p.grad.clone() for p in head.parameters()]

    ours = grads(amp.disable_casts(), "scale_loss")
    amp.restore(model, optimizer)
    assert cases.same(ours, grads(contextlib.nullcontext(), "plain"))


def dtypes_of_pass(model, optimizer, where="scale_loss"):
    loss = model(torch.randn(3, 4)).float().pow(2).mean()
    with around(loss, optimizer, where) as scaled_loss:
        scaled_loss.backward()
    return Product.dtypes


def test_a_block_mixes_dtypes_by_the_casts_of_its_own_session():
    first = cases.prepared("O1", model=Mixing(), loss_scale=1.0)
    second = cases.prepared("O4", model=Mixing(), loss_scale=1.0)
    assert dtypes_of_pass(*first) == [torch.float16] * 3 + [torch.float32]
    assert dtypes_of_pass(*second) == [torch.bfloat16] * 3 + [torch.float32]


@CASTING
def test_a_pass_in_a_thread_without_casts_mixes_dtypes_alike(level):
    low = cases.LEVELS[level].compute
    made = cases.prepared(level, model=Mixing(), loss_scale=1.0)
    found = []
    thread = threading.Thread(target=lambda: found.extend(dtypes_of_pass(*made)))
    thread.start()
    thread.join()
    assert found == [low, low, low, torch.float32]


def product():
    return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype


@CASTING
def test_initialize_inside_an_autocast_block_leaves_autocast_off(level):
    with torch.autocast("cpu", torch.bfloat16):
        made = cases.prepared(level)
    assert made[0](torch.ones(1, 4)).dtype is cases.LEVELS[level].compute
    del made
    gc.collect()
    assert not torch.is_autocast_enabled("cpu")
    assert product() is torch.float32


@CASTING
@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_initialize_inside_an_autocast_block_of_another_device_leaves_autocast_off(level):
    with torch.autocast("cuda", torch.bfloat16):
        made = cases.prepared(level)
    assert made[0](torch.ones(1, 4)).dtype is cases.LEVELS[level].compute
    del made
    gc.collect()
    assert product() is torch.float32


@CASTING
def test_a_float64_batch_leaves_the_scripts_own_float64_products(level):
    model, _optimizer = cases.prepared(level)
    x = torch.ones(2, 4, dtype=torch.float64)
    assert model(x).dtype is cases.LEVELS[level].compute
    assert (x @ x.t()).dtype is torch.float64


@CASTING
def test_one_argument_given_twice_arrives_as_one(level):
    class Same(nn.Linear):
        def forward(self, x, y, nest):
            assert x is y is nest[0]
            return super().forward(x)

    for each in (level, "O2", "O5"):
        model, _optimizer = cases.prepared(each, model=Same(4, 4))
        x = torch.ones(1, 4)
        model(x, x, nest=[x])


IN_PLACE = {
    "addmm_": ((3, 4), (3, 5), (5, 4)),
    "addmv_": ((3,), (3, 5), (5,)),
    "addr_": ((3, 4), (3,), (4,)),
    "addbmm_": ((3, 4), (2, 3, 5), (2, 5, 4)),
    "baddbmm_": ((2, 3, 4), (2, 3, 5), (2, 5, 4)),
}


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, check):
        ctx.check = check
        check()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.check()
        return grad, None


@PASSES
@CASTING
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_products_of_mixed_dtypes_take_that_of_self(name, level, where):
    low = cases.LEVELS[level].compute
    model, optimizer = cases.prepared(level, loss_scale=1.0)
    checked = []

    def check():
        for own in (low, torch.float32, torch.float64):
            shape, *shapes = IN_PLACE[name]
            x = torch.ones(shape, dtype=own)
            one, other = torch.randn(shapes[0]).to(low), torch.randn(shapes[1])
            expected = getattr(x.clone(), name)(one.to(own), other.to(own), beta=0.5)
            assert getattr(x, name)(one, other, beta=0.5) is x
            assert x.dtype is own
            torch.testing.assert_close(x, expected)
        checked.append(name)

    loss = InPlace.apply(model(torch.randn(3, 4)), check).float().mean()
    with around(loss, optimizer, where) as scaled_loss:
        scaled_loss.backward()
    assert checked == [name, name]
