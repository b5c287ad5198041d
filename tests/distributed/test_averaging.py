"""Ranks that average weights now and then instead of gradients: masters are what is averaged."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from apex import amp
from tests.distributed.cases import EPS, initialized
from tests.support import loops

pytestmark = pytest.mark.distributed

LEVELS = ("O0", *loops.MIXED)
STEPS = 6


def post_local_sgd(optimizer, averager):
    with warnings.catch_warnings():  # the import runs torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(optimizer, averager)


def trained_on(rank, level, way):
    """Weights as the modules hold them, and masters, right after the last average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model, optimizer = initialized(level, model) if level else plain(model)
    params = list(amp.master_params(optimizer)) if level else list(model.parameters())
    start = [param.detach().clone() for param in params]
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    stepped = post_local_sgd(optimizer, averager) if way == "optimizer" else optimizer
    momentum = [torch.zeros_like(param) for param in params]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loops.loss_of(model, *batch_of(rank, step))
        loops.scaled_backward(loss, optimizer) if level else loss.backward()
        stepped.step()
        if way == "averager":
            averager.average_parameters(params)
        elif way == "DiLoCo" and step % 2:
            outer_step(params, start, momentum)
    weights = [part.weight.detach().float().clone() for part in (model[0], model[3])]
    return weights, [param.detach().float().clone() for param in params]


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 4, generator=generator)
    return x, x[:, :2] + rank


def plain(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def outer_step(params, start, momentum):
    """docs/distributed.md's: an outer optimizer steps by what the inner steps have changed."""
    for param, before, kept in zip(params, start, momentum, strict=True):
        change = before - param
        dist.all_reduce(change)
        kept.mul_(0.5).add_(change, alpha=1 / dist.get_world_size())
        before.sub_(kept, alpha=0.7)
        param.copy_(before)


@loops.every(way=["optimizer", "averager", "DiLoCo"], level=LEVELS)
def test_averages_are_those_of_the_masters_on_all_ranks(on_two_ranks, level, way):
    (weights, masters), (other_weights, other_masters) = on_two_ranks(trained_on, level, way)
    assert loops.same(masters, other_masters)
    if way != "DiLoCo":  # copy_ reaches the model when it is next used
        assert loops.same(weights, other_weights)
    _, expected = on_two_ranks(trained_on, None, way)[0]
    tolerance = 32 * EPS[level]
    torch.testing.assert_close(masters, expected, rtol=tolerance, atol=tolerance)


def trained_after_sending(rank, level):
    """Rank 0 has stepped before it sends its masters by hand."""
    model = loops.net(seed=0)
    model, optimizer = initialized(level, model, loops.sgd(model.parameters()))
    if rank == 0:
        loops.train(model, optimizer, steps=1)
    for master in amp.master_params(optimizer):
        with torch.no_grad():
            dist.broadcast(master, 0)
        torch.autograd.graph.increment_version(master)
    loops.train(model, optimizer, steps=2)
    return loops.masters(optimizer)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_masters_that_are_sent_by_hand_are_alike_on_all_ranks(on_two_ranks, level):
    first, second = on_two_ranks(trained_after_sending, level)
    assert loops.same(first, second)
