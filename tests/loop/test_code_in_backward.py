"""Python code inside a backward pass: mixed dtypes are resolved, all else is left as it comes."""

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as t

casting = pytest.mark.parametrize("level", ["O1", "O4"])


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


def dtypes_of_pass(model, optimizer, block=amp.scale_loss):
    loss = model(torch.randn(3, 4)).float().pow(2).mean()
    with block(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return Product.dtypes


@casting
def test_a_functions_own_backward_may_mix_dtypes_in_a_block_and_outside_of_one(level):
    low = t.LEVELS[level].compute
    made = t.prepared(level, model=Mixing(), loss_scale=1.0)
    assert dtypes_of_pass(*made) == [low, low, low, torch.float32]

    def outside(loss, optimizer):
        return contextlib.nullcontext(loss)

    # There the pass runs under its thread's casts, as in apex.
    assert dtypes_of_pass(*made, outside) == [low] * 4


def test_a_block_mixes_dtypes_by_the_casts_of_its_own_session_in_any_thread():
    first = t.prepared("O1", model=Mixing(), loss_scale=1.0)
    second = t.prepared("O4", model=Mixing(), loss_scale=1.0)
    found = []

    def work():
        found.append(dtypes_of_pass(*first))
        found.append(dtypes_of_pass(*second))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[low] * 3 + [torch.float32] for low in (torch.float16, torch.bfloat16)] * 2


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@casting
def test_initialize_inside_an_autocast_block_leaves_autocast_off(level, device):
    with torch.autocast(device, torch.bfloat16):
        made = t.prepared(level)
    assert made[0](torch.ones(1, 4)).dtype is t.LEVELS[level].compute
    del made
    gc.collect()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


@casting
def test_a_float64_batch_leaves_the_scripts_own_float64_products(level):
    model, _optimizer = t.prepared(level)
    x = torch.ones(2, 4, dtype=torch.float64)
    assert model(x).dtype is t.LEVELS[level].compute
    assert (x @ x.t()).dtype is torch.float64


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


@pytest.mark.parametrize("name", IN_PLACE)
@casting
def test_in_place_products_of_mixed_dtypes_take_that_of_self(name, level):
    low = t.LEVELS[level].compute
    model, optimizer = t.prepared(level, loss_scale=1.0)
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
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert checked == [name, name]
