"""Networks that need more of DistributedDataParallel: branches, batch norm, sharded optimizers."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex.parallel import SyncBatchNorm, convert_syncbn_model
from tests.distributed import cases
from tests.support import loops

pytestmark = pytest.mark.distributed


# -- unused parameters -----------------------------------------------------------------------


def call_in_turn(self, x):
    self.step += 1
    return (self.first if self.step % 2 else self.second)(x)


def branches():
    """Uses one of two layers, by the step."""
    torch.manual_seed(3)
    return loops.Body(call_in_turn, first=nn.Linear(4, 2), second=nn.Linear(4, 2), step=0)


def train_branches(rank, level):
    model, optimizer = cases.initialized(level, branches())
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    return cases.train_on_data_of(rank, parallel, optimizer, steps=4)


def test_unused_parameters_are_found(on_two_ranks, level):
    first = cases.alike(on_two_ranks(train_branches, level))
    cases.assert_trained_as_one(first, level, branches(), steps=4)


# -- parameters that a wrapper ignores -------------------------------------------------------


def change_of_an_own_part(rank, level):
    """Greatest change in one step of a layer that each rank has for itself."""
    model = loops.net()
    model[0] = loops.net(seed=rank)[0]
    names = ["0.weight", "0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    model, optimizer = cases.initialized(level, model)
    before = loops.masters(optimizer)[0]
    cases.backward(DistributedDataParallel(model), optimizer, *cases.rank_batch(rank, 0))
    optimizer.step()
    return float((loops.masters(optimizer)[0] - before).abs().max())


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_parameters_that_a_wrapper_ignores_stay_each_ranks_own(on_two_ranks, level):
    assert 0.0 < max(on_two_ranks(change_of_an_own_part, level)) < 0.05


# -- gradients that a kernel makes in fp32 ---------------------------------------------------


class Fp32Grads(torch.autograd.Function):
    """A linear function whose weight gets a gradient in fp32, as from oneDNN's LSTM."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, grad.float().t() @ x.float()


def train_fp32_grads(level, wrap, seed, batch_at):
    torch.manual_seed(3)
    linear = nn.Linear(4, 2, bias=False)
    model = loops.Body(lambda self, x: Fp32Grads.apply(x, self.linear.weight), linear=linear)
    model, optimizer = cases.initialized(level, model)
    parallel = wrap(model)
    for step in range(2):
        for index in (2 * step, 2 * step + 1):  # the second pass begins beside an fp32 gradient
            loops.backward(parallel, optimizer, *batch_at(index))
        optimizer.step()
        optimizer.zero_grad()
    linear.weight.grad = torch.zeros(2, 4)  # in fp32, as after any pass
    return model, optimizer


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_gradients_that_a_kernel_makes_in_fp32_are_sent_in_16_bits(on_two_ranks, level):
    cases.assert_runs_as_one(on_two_ranks, train_fp32_grads, level, "torch")


# -- synchronized batch norm -----------------------------------------------------------------


def normed(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def train_normed(rank, level, converted):
    model = normed(seed=5 + rank)
    if converted == "before":
        model = convert_syncbn_model(model)
    model, optimizer = cases.initialized(level, model)
    if converted == "after":
        model = convert_syncbn_model(model)
    kind = type(model[1])
    parallel = DistributedDataParallel(model)
    state = cases.train_on_data_of(rank, parallel, optimizer)
    return issubclass(kind, SyncBatchNorm), state, model[1].running_mean


@pytest.mark.parametrize("converted", ["before", "after"])
def test_batch_norm_over_ranks_is_batch_norm_over_the_joined_batch(on_two_ranks, level, converted):
    (synced, first, mean), (_, second, other_mean) = on_two_ranks(train_normed, level, converted)
    assert synced
    assert first == second
    assert torch.equal(mean, other_mean)
    model = normed()
    cases.assert_trained_as_one(first, level, model, eps=32)
    tolerance = 32 * cases.EPS[level]
    torch.testing.assert_close(mean, model[1].running_mean, rtol=tolerance, atol=tolerance)


# -- optimizers that shard their state -------------------------------------------------------


def sharded_adam(params):
    with warnings.catch_warnings():  # the import runs torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=1e-2)


def train_with_sharded_state(rank, level):
    model = loops.net(3 + rank)
    optimizer = sharded_adam(model.parameters())
    try:
        model, optimizer = cases.initialized(level, model, optimizer)
    except RuntimeError as error:
        return str(error), {p.dtype for p in model.parameters()}
    parallel = DistributedDataParallel(model)
    return cases.train_on_data_of(rank, parallel, optimizer)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_zero_redundancy_optimizer_trains_where_there_are_no_masters(on_two_ranks, level):
    first = cases.alike(on_two_ranks(train_with_sharded_state, level))
    model = loops.net(3)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    cases.assert_trained_as_one(first, level, model, adam, eps=32)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_zero_redundancy_optimizer_is_refused_with_masters(on_two_ranks, level):
    for message, dtypes in on_two_ranks(train_with_sharded_state, level):
        assert "ZeroRedundancyOptimizer" in message
        assert "fully_shard" in message
        assert dtypes == {torch.float32}
