"""Casts are off in every optimizer's step, also in one that amp has not prepared."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from apex import amp
from tests.support.loops import prepared

FP32 = torch.float32


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


class Multiplies(torch.optim.Optimizer):
    """Notes the dtype of a product in its step; runs ``inside`` and the closure there."""

    def __init__(self, inside=lambda: None):
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.inside, self.found = inside, []

    def step(self, closure=None):
        self.found.append(product())
        loss = None if closure is None else closure()
        self.inside()
        self.found.append(product())
        return loss


LEVELS = pytest.mark.parametrize(("level", "low"), [("O1", torch.float16), ("O4", torch.bfloat16)])


@LEVELS
def test_a_step_beside_amp_computes_in_fp32(level, low):
    held = prepared(level)
    optimizer = Multiplies()
    optimizer.step()
    assert optimizer.found == [FP32] * 2
    assert product() is low
    del held


@LEVELS
@pytest.mark.parametrize("named", [True, False])
def test_its_closure_has_casts(level, low, named):
    held = prepared(level)
    optimizer = Multiplies()
    dtype = optimizer.step(closure=product) if named else optimizer.step(product)
    assert dtype is low
    assert optimizer.found == [FP32] * 2
    assert product() is low
    del held


def test_a_step_inside_another_leaves_the_casts_of_the_outer_one_off():
    held = prepared("O4")
    inner = Multiplies()
    outer = Multiplies(inner.step)
    outer.step()
    assert inner.found == outer.found == [FP32] * 2
    assert product() is torch.bfloat16
    del held


@pytest.mark.parametrize("where", ["step", "closure", "inner step"])
def test_casts_are_on_again_at_the_forward_after_a_step_that_raised(where):
    model, _ = prepared("O4", model=nn.Linear(2, 2))

    def fail():
        raise KeyError(where)

    optimizer = Multiplies(Multiplies(fail).step if where == "inner step" else fail)
    with pytest.raises(KeyError):
        optimizer.step(*([fail] if where == "closure" else []))
    model(torch.ones(1, 2))
    assert product() is torch.bfloat16


def test_a_users_own_autocast_around_a_step_stays():
    held = prepared("O4")
    optimizer = Multiplies()
    with torch.autocast("cpu", torch.float16):
        optimizer.step()
    assert optimizer.found == [torch.float16] * 2
    del held


def test_hooks_on_steps_end_with_the_last_session():
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    assert not any(hooks)
    first, second = prepared("O4"), prepared("O5")
    del first
    assert all(hooks)
    amp.restore(*second)
    del second
    assert not any(hooks)
