"""Plain loops under DistributedDataParallel and ``fully_shard``, watched on two ranks."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.debug.test_plain_loops import bf16_model, fp16_autocast, sgd
from tests.support.features import shards_on_cpu
from tests.training.cases import batch, batches, net

pytestmark = pytest.mark.distributed


def watched(make, rank):
    loop = make()
    loop.called = DistributedDataParallel(loop.model)
    options = {"model": loop.called, "scaler": loop.scaler}
    history = amp.debug.History(loop.optimizer, **options)
    amp.debug.arm(loop.optimizer, **options)
    skips = {1} if loop.scaler.is_enabled() and rank == 1 else ()
    for x, y in batches(3, seed=rank, overflow_at=skips):
        loop.step(x, y)
    return [(p.overflow, p.grad_norm) for p in history.passes], loop.norms


def under_ddp(rank):
    return [watched(make, rank) for make in (fp16_autocast, bf16_model)]


def test_under_ddp_norms_and_skips_are_those_of_the_reduced_gradients(on_two_ranks):
    results = on_two_ranks(under_ddp)
    for ranks in zip(*results, strict=True):
        (passes, norms), (other, _) = ranks
        assert [overflow for overflow, _ in passes] == [overflow for overflow, _ in other]
        for (overflow, norm), expected in zip(passes, norms, strict=True):
            assert overflow != math.isfinite(norm)
            assert overflow or norm == pytest.approx(expected, rel=1e-4)
    assert [overflow for overflow, _ in results[0][0][0]] == [False, True, False]


def sharded_model(rank):
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = sgd(model.parameters())
    history = amp.debug.History(optimizer, model=model)
    amp.debug.arm(optimizer, model=model)
    x, y = batch()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    return history.passes[0].grad_norm


@shards_on_cpu
def test_the_norm_of_a_sharded_model_covers_all_shards(on_two_ranks):
    model = net()
    x, y = batch()
    ((model(x) - y) ** 2).mean().backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for found in on_two_ranks(sharded_model):
        assert found == pytest.approx(norm, rel=1e-5)
