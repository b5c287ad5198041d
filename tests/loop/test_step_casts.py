"""Op casts are off in the optimizer's own arithmetic, and on in the closure that it calls."""

import contextlib

import pytest
import torch

from apex import amp
from tests.support import loops

casting = pytest.mark.parametrize("level", ["O1", "O4"])


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


class MatrixOptimizer(torch.optim.Optimizer):
    """Steps by a matrix product, and notes its type."""

    def __init__(self, params):
        super().__init__(params, {})
        self.dtypes = []

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.dtypes.append(product())
        return loss


@pytest.mark.parametrize("step", [loops.train_step, loops.train_step_with_closure])
@casting
def test_the_step_computes_in_fp32(level, step):
    model, optimizer = loops.prepared(level, MatrixOptimizer)
    step(model, optimizer, *loops.batch())
    assert optimizer.dtypes == [torch.float32]


@casting
def test_a_closure_is_cast_as_around_the_step_also_after_one_that_raises(level):
    _model, optimizer = loops.prepared(level, MatrixOptimizer)
    seen = []

    def closure():
        seen.append(product())
        raise KeyError

    for around in (contextlib.nullcontext, amp.disable_casts):
        with around(), pytest.raises(KeyError):
            optimizer.step(closure)
    low = loops.LEVELS[level].compute
    assert [*seen, product()] == [low, torch.float32, low]
