"""torch's DistributedDataParallel with 16-bit gradients averaged in fp32."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import apex.parallel
from apex import amp
from apex.parallel import reduce_in_fp32
from tests.distributed.cases import (
    assert_trained_alike,
    backward,
    batch,
    initialized,
    joined,
    net,
    prepare,
    state,
    train_steps,
)
from tests.training.cases import LEVELS

distributed = pytest.mark.distributed

COLUMNS = 16
LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def in_fp32(model, **options):
    wrapped = DistributedDataParallel(model, **options)
    reduce_in_fp32(wrapped)
    return wrapped


# -- the mean ----------------------------------------------------------------------------------


def gradient_of(rank, dtype):
    """A gradient that a sum in 16 bits loses parts of: each rank's own exponents."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(COLUMNS, generator=generator) * 8.0 ** (rank % 3)).to(dtype)


class Weighted(nn.Module):
    """Its weight's gradient is what it is given; the other parameter stays in fp32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLUMNS))
        self.norm = nn.BatchNorm1d(COLUMNS)

    def forward(self, x):
        return (x * self.weight).sum() + self.norm(x).sum() * 0 + self.norm.bias.sum() / 3


def received(rank, level, wrap, tiny=False):
    """The weight's gradient on its master, and batch norm's, after one backward pass."""
    gc.collect()  # casts of an earlier test end with its models
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0
    )
    wrapped = {"fp32": in_fp32, "torch": DistributedDataParallel}[wrap](model)
    given = torch.full((COLUMNS,), 2.0**-24) if tiny else gradient_of(rank, LOW[level]).float()
    rows = torch.stack([given, torch.zeros(COLUMNS)])
    with amp.scale_loss(wrapped(rows), optimizer) as scaled_loss:
        scaled_loss.backward()
    grads = [param.grad for param in amp.master_params(optimizer)]
    return grads[0].tolist(), grads[2].tolist()


def mean_in_fp32(level, ranks):
    given = [gradient_of(rank, LOW[level]).float() for rank in range(ranks)]
    return (torch.stack(given).sum(0) / ranks).to(LOW[level])


@distributed
@pytest.mark.parametrize("level", LOW)
def test_two_ranks_get_the_rounded_fp32_mean(on_two_ranks, level):
    for grad, bias in on_two_ranks(received, level, "fp32"):
        assert torch.equal(torch.tensor(grad), mean_in_fp32(level, 2).float())
        assert bias == pytest.approx([1 / 3] * COLUMNS, rel=2.0**-7)


@distributed
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_four_ranks_get_the_rounded_fp32_mean_and_a_16_bit_sum_is_another(on_four_ranks, level):
    expected = mean_in_fp32(level, 4).float()
    eps = torch.finfo(LOW[level]).eps
    for grad, _ in on_four_ranks(received, level, "fp32"):
        # Four fp32 numbers may be added in any order: next to a tie that decides the rounding.
        torch.testing.assert_close(torch.tensor(grad), expected, rtol=eps, atol=0.0)
        assert (torch.tensor(grad) == expected).sum() >= COLUMNS - 1
    grad, _ = on_four_ranks(received, level, "torch")[0]
    assert (torch.tensor(grad) == expected).sum() < COLUMNS - 1


@distributed
def test_a_gradient_at_the_end_of_fp16_survives_the_division(on_two_ranks):
    for grad, _ in on_two_ranks(received, "O2", "fp32", True):
        assert grad == [2.0**-24] * COLUMNS
    for grad, _ in on_two_ranks(received, "O2", "torch", True):
        assert grad == [0.0] * COLUMNS


# -- training ----------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train(rank, level, options):
    model, optimizer = prepare(level, seed=rank)
    parallel = in_fp32(model, **OPTIONS[options])
    train_steps(parallel, optimizer, [batch(rank, step) for step in range(5)])
    return state(parallel, optimizer)


@distributed
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize(
    ("level", "options"),
    [*((level, "plain") for level in LEVELS), *(("O5", options) for options in OPTIONS)],
)
def test_ranks_stay_alike_and_train_as_one_process(on_two_ranks, level, options):
    first, second = on_two_ranks(train, level, options)
    assert first == second
    model, optimizer = prepare(level, seed=0)
    train_steps(model, optimizer, [joined(step) for step in range(5)])
    assert_trained_alike(first, optimizer, level)


def accumulate(rank, level, poisoned):
    model, optimizer = prepare(level, seed=rank)
    parallel = in_fp32(model)
    for step in range(4):
        x, y = batch(rank, step)
        if poisoned and (rank, step) == (1, 1):
            x = x * torch.inf
        with contextlib.nullcontext() if step % 2 else parallel.no_sync():
            backward(parallel, optimizer, x, y, share=0.5)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(parallel, optimizer)


@distributed
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_accumulation_without_sync_is_sent_in_fp32_with_the_last(on_two_ranks, level):
    first, second = on_two_ranks(accumulate, level, False)
    assert first == second
    model, optimizer = prepare(level, seed=0)
    for step in range(4):
        backward(model, optimizer, *joined(step), share=0.5)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_trained_alike(first, optimizer, level)


@distributed
def test_an_inf_of_one_rank_skips_on_all(on_two_ranks):
    first, second = on_two_ranks(accumulate, "O2", True)
    assert first == second
    assert first["scales"]["loss_scaler0"]["loss_scale"] == 2.0**7


def in_own_group(rank):
    """Two pairs of ranks, each with a wrapper in a group of its own."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    model, optimizer = initialized("O5", net(0))
    parallel = DistributedDataParallel(model, process_group=groups[rank // 2])
    reduce_in_fp32(parallel)
    train_steps(parallel, optimizer, [batch(rank, step) for step in range(2)])
    return state(parallel, optimizer)


@distributed
def test_the_sum_is_over_the_wrapper_s_own_group(on_four_ranks):
    states = on_four_ranks(in_own_group)
    assert states[0] == states[1] != states[2] == states[3]


# -- mistakes ----------------------------------------------------------------------------------


def test_a_model_without_a_wrapper_is_refused():
    with pytest.raises(TypeError, match=r"got Linear.*DistributedDataParallel.*fully_shard"):
        reduce_in_fp32(nn.Linear(1, 1))


def test_apex_s_wrapper_is_told_its_own_option(alone):
    wrapped = apex.parallel.DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="allreduce_always_fp32=True"):
        reduce_in_fp32(wrapped)


def test_a_second_hook_is_refused_by_torch(alone):
    wrapped = in_fp32(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="once"):
        reduce_in_fp32(wrapped)
