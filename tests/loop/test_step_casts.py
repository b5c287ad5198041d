"""Op casts are off in the optimizer's own arithmetic, and on in the closure that it calls."""

import pytest
import torch

from apex import amp
from tests.support import training as cases


class MatrixOptimizer(torch.optim.Optimizer):
    """Steps by a matrix product, and notes its type."""

    def __init__(self, params):
        super().__init__(params, {})
        self.dtypes = []

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.dtypes.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return loss


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_the_step_computes_in_fp32(level):
    model, optimizer = cases.prepared(level, MatrixOptimizer)
    cases.train_step(model, optimizer, *cases.batch())
    assert optimizer.dtypes == [torch.float32]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_the_step_computes_in_fp32_around_a_closure(level):
    model, optimizer = cases.prepared(level, MatrixOptimizer)
    cases.train_step_with_closure(model, optimizer, *cases.batch())
    assert optimizer.dtypes == [torch.float32]


def type_in_closure(optimizer):
    seen = []

    def closure():
        seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return torch.zeros(())

    optimizer.step(closure)
    return seen


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_ops_of_the_closure_are_cast(level):
    _model, optimizer = cases.prepared(level, MatrixOptimizer)
    assert type_in_closure(optimizer) == [cases.LEVELS[level].compute]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_disable_casts_around_the_step_holds_in_the_closure(level):
    _model, optimizer = cases.prepared(level, MatrixOptimizer)
    with amp.disable_casts():
        assert type_in_closure(optimizer) == [torch.float32]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_closure_that_raises_leaves_casts_on(level):
    _model, optimizer = cases.prepared(level, MatrixOptimizer)

    def closure():
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is cases.LEVELS[level].compute
