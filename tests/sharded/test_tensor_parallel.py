"""Tensor parallelism, alone and with ``fully_shard`` on a second dimension of the mesh."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial

from apex import amp
from tests.sharded.cases import OPTIMIZERS, Parallel, in_parallel, master_of, mesh, prepared, wholes
from tests.support.features import shards_on_cpu
from tests.training.cases import backward, batches, train_step

LEVELS = ("O4", "O5")
"""fp16 is as right, and slow."""


def data(steps=4):
    for x, y in batches(steps, overflow_at={1}):
        yield torch.cat([x, x[:1]]), torch.cat([y, y[:1]])  # rows that two ranks share out


def alone(level):
    model, optimizer = prepared(level, Parallel(), OPTIMIZERS["SGD"])
    for x, y in data():
        train_step(model, optimizer, x, y)
    return wholes(amp.master_params(optimizer))


def split(rank):
    results = {}
    for level in LEVELS:
        model, optimizer = prepared(level, in_parallel(mesh(2)), OPTIMIZERS["SGD"])
        for x, y in data():
            train_step(model, optimizer, x, y)
        results[level] = wholes(amp.master_params(optimizer))
    return results


def split_and_sharded(rank):
    results = {}
    for level in LEVELS:
        plane = mesh(2, 2, names=("data", "model"))
        model = in_parallel(plane["model"])
        model, optimizer = prepared(
            level, fully_shard(model, mesh=plane["data"]), OPTIMIZERS["SGD"]
        )
        for x, y in data():
            train_step(model, optimizer, x, y)
        results[level] = wholes(amp.master_params(optimizer))
    return results


def agrees(one, two):
    return torch.allclose(one, two, rtol=2.0**-6, atol=2.0**-6)


def test_tensor_parallel_ranks_train_as_one_process(on_two_ranks):
    for results in on_two_ranks(split):
        for level in LEVELS:
            assert all(map(agrees, alone(level), results[level])), level


@shards_on_cpu
def test_ranks_of_a_plane_train_as_one_process(on_four_ranks):
    for results in on_four_ranks(split_and_sharded):
        for level in LEVELS:
            assert all(map(agrees, alone(level), results[level])), level


def gradients_of_the_norm(rank, level):
    model, optimizer = prepared(level, in_parallel(mesh(2)), OPTIMIZERS["SGD"])
    backward(model, optimizer, *next(data()))
    master = master_of(model, optimizer, "norm.weight")
    return [str(p) for p in master.grad.placements], [str(p) for p in master.placements]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_parts_of_a_sum_are_summed(level, on_two_ranks):
    for gradient, parameter in on_two_ranks(gradients_of_the_norm, level):
        assert gradient == parameter


def overflow_of_a_sum(rank):
    """Parts that are finite in fp16, and whose sum is not."""
    model, optimizer = prepared("O2", in_parallel(mesh(2)), OPTIMIZERS["SGD"])
    x, _ = next(data())
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        grad = model.norm.weight.grad
        assert grad.placements == (Partial(),)
        grad.to_local().fill_(40000.0)
    master = master_of(model, optimizer, "norm.weight")
    return master.grad.to_local()[0].item() * 2.0**12


def test_parts_of_a_sum_are_summed_in_fp32(on_two_ranks):
    assert on_two_ranks(overflow_of_a_sum) == [80000.0, 80000.0]
