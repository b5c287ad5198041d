"""Op casts are off in every optimizer's own arithmetic, and on in the closure that it calls."""

import contextlib

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops
from tests.support.loops import product

FP32 = torch.float32
level = loops.at_levels("O1", "O4")
low = pytest.fixture(lambda level: loops.LEVELS[level].compute)


class Multiplies(torch.optim.Optimizer):
    """Notes the dtype of a product in its step; runs ``inside`` and the closure there."""

    def __init__(self, params=(), inside=lambda: None):
        super().__init__(list(params) or [nn.Parameter(torch.ones(1))], {})
        self.inside, self.dtypes = inside, []

    def step(self, closure=None):
        self.dtypes.append(product())
        loss = None if closure is None else closure()
        self.inside()
        self.dtypes.append(product())
        return loss


@pytest.mark.parametrize("step", [loops.train_step, loops.train_step_with_closure])
def test_the_step_computes_in_fp32(level, low, step):
    model, optimizer = loops.prepared(level, Multiplies, loss_scale=64.0)
    step(model, optimizer, *loops.batch())
    assert optimizer.dtypes == [FP32] * 2
    assert product() is low


def test_a_closure_is_cast_as_around_the_step_also_after_one_that_raises(level, low):
    _model, optimizer = loops.prepared(level, Multiplies, loss_scale=64.0)
    seen = []

    def closure():
        seen.append(product())
        raise KeyError

    for around in (contextlib.nullcontext, amp.disable_casts):
        with around(), pytest.raises(KeyError):
            optimizer.step(closure)
    assert [*seen, product()] == [low, FP32, low]


# -- an optimizer that amp has not prepared --------------------------------------------------


def test_a_step_beside_amp_computes_in_fp32_and_its_closure_has_casts(level, low):
    _held = loops.prepared(level)
    for arguments in ({}, {"closure": None}, {"closure": product}):
        optimizer = Multiplies()
        assert optimizer.step(**arguments) is (low if any(arguments.values()) else None)
        assert optimizer.dtypes == [FP32] * 2
        assert product() is low
    assert optimizer.step(product) is low
    assert optimizer.step(None) is None


def test_a_step_inside_another_leaves_the_casts_of_the_outer_one_off():
    _held = loops.prepared("O4")
    inner = Multiplies()
    outer = Multiplies(inside=inner.step)
    outer.step()
    assert inner.dtypes == outer.dtypes == [FP32] * 2
    assert product() is torch.bfloat16


@pytest.mark.parametrize("where", ["step", "closure", "inner step"])
def test_casts_are_on_again_at_the_forward_after_a_step_that_raised(where):
    model, _ = loops.prepared("O4", model=nn.Linear(2, 2))

    def fail():
        raise KeyError(where)

    inside = Multiplies(inside=fail).step if where == "inner step" else fail
    with pytest.raises(KeyError):
        Multiplies(inside=inside).step(*([fail] if where == "closure" else []))
    model(torch.ones(1, 2))
    assert product() is torch.bfloat16


def test_a_users_own_autocast_around_a_step_stays():
    _held = loops.prepared("O4")
    optimizer = Multiplies()
    with torch.autocast("cpu", torch.float16):
        optimizer.step()
    assert optimizer.dtypes == [torch.float16] * 2
