"""Sparse gradients and complex parameters."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params), lr=0.5),
}
IDS = torch.tensor([1, 3, 1])


def embedding(level, name="SGD", **options):
    return loops.prepared(level, OPTIMIZERS[name], nn.Embedding(5, 4, sparse=True), **options)


def squares(model):
    return model(IDS).float().square().sum()


@loops.every(name=OPTIMIZERS, passes=[1, 2])
def test_sparse_gradients_train_like_by_hand(level, name, passes):
    model, optimizer = embedding(level, name, loss_scale=8.0)
    weight = nn.Parameter(loops.masters(optimizer)[0])
    by_hand = OPTIMIZERS[name]([weight])
    for _ in range(3):
        optimizer.zero_grad(set_to_none=passes == 1)
        for _ in range(passes):
            loops.scaled_backward(squares(model), optimizer)
        assert next(amp.master_params(optimizer)).grad.is_sparse
        optimizer.step()
        low = weight.detach().to(loops.LEVELS[level].stored).requires_grad_()
        out = nn.functional.embedding(IDS, low, sparse=True)
        (out.float().square().sum() * 8.0).backward()
        weight.grad = (passes * low.grad.float().coalesce() / 8.0).coalesce()
        by_hand.step()
    torch.testing.assert_close(weight.data, loops.masters(optimizer)[0])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_duplicate_rows_are_summed_in_fp32_where_there_are_masters(level):
    """Else their sum overflows."""
    model, optimizer = embedding(level, loss_scale="dynamic")
    before = loops.masters(optimizer)
    # Each row of 2**15 fits into fp16, their sum of 3 * 2**15 does not.
    loops.scaled_backward(0.5 * model(torch.zeros(3, dtype=torch.int64)).float().sum(), optimizer)
    if level == "O3":
        optimizer.step()
        assert loops.same(loops.masters(optimizer), before)
    else:
        (grad,) = (param.grad for param in amp.master_params(optimizer))
        assert torch.equal(grad.to_dense()[0], torch.full((4,), 1.5))
    assert loops.loss_scale() == (2.0**15 if level == "O3" else 2.0**16)


def look_up(self, ids, multiply):
    """Looks one table up (sparse gradient), or multiplies it (dense gradient)."""
    return self.table.weight.sum(0) if multiply else self.table(ids)


@pytest.mark.parametrize("dense_first", [True, False])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(level, dense_first):
    tied = loops.Body(look_up, table=nn.Embedding(5, 4, sparse=True))
    model, optimizer = loops.prepared(level, model=tied, loss_scale=8.0)
    for multiply in (dense_first, not dense_first):
        loops.scaled_backward(model(IDS, multiply).float().sum(), optimizer)
    (grad,) = (param.grad for param in amp.master_params(optimizer))
    expected = torch.ones(5, 4)
    expected[1] += 2
    expected[3] += 1
    assert torch.equal(grad, expected)


def rotate(self, x):
    return (self.linear(x).to(torch.complex64) * self.factor).abs()


def rotation():
    """A linear layer and a complex factor."""
    factor = nn.Parameter(torch.tensor([1.0 + 1.0j, 0.5 - 0.5j]))
    return loops.Body(rotate, linear=nn.Linear(4, 2), factor=factor)


@pytest.mark.parametrize("passes", [1, 2])
def test_complex_parameters_keep_their_type_and_get_true_gradients(level, passes):
    model, optimizer = loops.prepared(level, model=rotation(), loss_scale=8.0)
    twin, _ = loops.prepared(level, model=rotation(), loss_scale=1.0)
    twin.load_state_dict(model.state_dict())
    x, _ = loops.batch()
    for _ in range(passes):
        loops.scaled_backward(model(x).float().sum(), optimizer)
        twin(x).float().sum().backward()
    eps = 8 * torch.finfo(loops.LEVELS[level].compute).eps
    assert model.factor.dtype is torch.complex64
    torch.testing.assert_close(model.factor.grad, twin.factor.grad, rtol=eps, atol=eps)


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_inf_in_such_a_gradient_skips_the_step(level, kind):
    if kind == "sparse":
        model, optimizer = embedding(level, "SparseAdam", loss_scale="dynamic")
        loss = squares(model)
    else:
        model, optimizer = loops.prepared(level, model=rotation(), loss_scale="dynamic")
        loss = model.factor.abs().sum()
    before = loops.masters(optimizer)
    loops.descend(loss * float("inf"), optimizer)
    assert loops.same(before, loops.masters(optimizer))
    assert loops.loss_scale() == 2.0**15
