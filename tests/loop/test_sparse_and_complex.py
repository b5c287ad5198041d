"""Sparse gradients and complex parameters."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as cases

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.5),
}
IDS = torch.tensor([1, 3, 1])


def embedding(level, name, **options):
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def backward(model, optimizer, factor=1.0):
    with amp.scale_loss(model(IDS).float().square().sum() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", cases.MIXED)
def test_sparse_gradients_train_like_by_hand(level, name):
    model, optimizer = embedding(level, name, loss_scale=8.0)
    weight = nn.Parameter(cases.masters(optimizer)[0])
    by_hand = OPTIMIZERS[name]([weight])
    stored = cases.LEVELS[level].stored
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, optimizer)
        assert next(amp.master_params(optimizer)).grad.is_sparse
        optimizer.step()
        low = weight.detach().to(stored).requires_grad_()
        out = nn.functional.embedding(IDS, low, sparse=True)
        (out.float().square().sum() * 8.0).backward()
        weight.grad = (low.grad.float().coalesce() / 8.0).coalesce()
        by_hand.step()
    assert cases.same(weight.data, cases.masters(optimizer)[0])


@pytest.mark.parametrize("level", cases.MIXED)
def test_sparse_gradients_of_two_passes_add_up(level):
    once, twice = (embedding(level, "SGD", loss_scale=8.0) for _ in range(2))
    with torch.no_grad():
        for model, optimizer in (once, twice):
            for param in (*model.parameters(), *amp.master_params(optimizer)):
                param.fill_(0.5)
    backward(*once, factor=2.0)
    backward(*twice)
    backward(*twice)
    for _, optimizer in (once, twice):
        optimizer.step()
    assert cases.same(cases.masters(once[1]), cases.masters(twice[1]))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_duplicate_rows_are_summed_in_fp32(level):
    model, optimizer = embedding(level, "SGD", loss_scale="dynamic")
    rows = torch.zeros(3, dtype=torch.int64)
    # Each row of 2**15 fits into fp16, their sum of 3 * 2**15 does not.
    with amp.scale_loss(model(rows).float().sum() * 0.5, optimizer) as scaled_loss:
        scaled_loss.backward()
    (grad,) = (param.grad for param in amp.master_params(optimizer))
    assert torch.equal(grad.to_dense()[0], torch.full((4,), 1.5))
    assert cases.loss_scale() == 2.0**16


def test_duplicate_rows_whose_16_bit_sum_overflows_skip_the_step():
    model, optimizer = embedding("O3", "SGD", loss_scale="dynamic")
    before = cases.values(model.parameters())
    rows = torch.zeros(3, dtype=torch.int64)
    with amp.scale_loss(model(rows).float().sum() * 0.5, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert cases.loss_scale() == 2.0**15
    assert cases.same(before, cases.values(model.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inf_in_a_sparse_gradient_skips_the_step(level, name):
    model, optimizer = embedding(level, name)
    before = cases.masters(optimizer)
    backward(model, optimizer, factor=float("inf"))
    optimizer.step()
    assert cases.same(before, cases.masters(optimizer))
    assert cases.loss_scale() == 2.0**15


class Tied(nn.Module):
    """One table, looked up (sparse gradient) or multiplied (dense gradient)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, ids, multiply):
        return self.table.weight.sum(0) if multiply else self.table(ids)


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("level", cases.MIXED)
def test_sparse_and_dense_gradients_of_one_parameter_add_up(level, dense_first):
    model, optimizer = cases.prepared(level, model=Tied(), loss_scale=8.0)
    for multiply in (dense_first, not dense_first):
        with amp.scale_loss(model(IDS, multiply).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    (grad,) = (param.grad for param in amp.master_params(optimizer))
    expected = torch.ones(5, 4)
    expected[1] += 2
    expected[3] += 1
    assert torch.equal(grad, expected)


class Rotation(nn.Module):
    """A linear layer and a complex factor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.factor = nn.Parameter(torch.tensor([1.0 + 1.0j, 0.5 - 0.5j]))

    def forward(self, x):
        return (self.linear(x).to(torch.complex64) * self.factor).abs()


@pytest.mark.parametrize("level", cases.LEVELS)
def test_complex_parameters_keep_their_type(level):
    model, _ = cases.prepared(level, model=Rotation())
    assert model.factor.dtype is torch.complex64


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_complex_parameters_get_true_gradients(level, passes):
    model, optimizer = cases.prepared(level, model=Rotation(), loss_scale=8.0)
    twin, _ = cases.prepared(level, model=Rotation(), loss_scale=1.0)
    twin.load_state_dict(model.state_dict())
    x, _ = cases.batch()
    for _ in range(passes):
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        twin(x).float().sum().backward()
    eps = torch.finfo(cases.LEVELS[level].compute).eps
    torch.testing.assert_close(model.factor.grad, twin.factor.grad, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inf_in_a_complex_gradient_skips_the_step(level):
    model, optimizer = cases.prepared(level, model=Rotation())
    before = cases.values(model.parameters())
    with amp.scale_loss(model.factor.abs().sum() * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert cases.same(before, cases.values(model.parameters()))
