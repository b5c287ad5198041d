"""The step in one pass of sharded parameters, and the clipping of their norm."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from apex import amp
from apex._engine.optimizer import deferred, one_pass
from apex._torch import blocks
from apex.optimizers import FusedAdam
from tests.sharded.cases import mesh, net, prepared, shard, wholes
from tests.support.features import shards_on_cpu
from tests.training.cases import WITH_MASTERS, backward, batches, same

pytestmark = shards_on_cpu

DATA = list(batches(4, overflow_at={2}))
NORMS = (2.0, 1.0, float("inf"))


def trained(model, level, clip=None, accumulates=1, make_optimizer=None, **options):
    """What a training leaves on this rank, and the norms that it saw."""
    model, optimizer = prepared(level, model, make_optimizer, **options)
    norms = []
    for x, y in DATA:
        optimizer.zero_grad()
        for _ in range(accumulates):
            backward(model, optimizer, x, y)
        found = [deferred.of(param) is not None for param in amp.master_params(optimizer)]
        assert all(found) is (accumulates == 1 and one_pass.enabled)
        if clip is not None:
            norms.append(amp.clip_grad_norm_(optimizer, 0.1, clip))
        optimizer.step()
    grads = [param.grad for param in (*amp.master_params(optimizer), *model.parameters())]
    parts = [*amp.master_params(optimizer), *model.parameters(), *grads]
    assert all(isinstance(part, DTensor) for part in parts[: len(parts) // 2])
    return [part.detach().to_local().clone() for part in parts], norms


def both_ways(rank, level, world_size):
    one_pass.least_elements, blocks._LEAST = 1, 16
    results = []
    apexs = {"make_optimizer": FusedAdam}
    for kwargs in ({}, {"clip": 2.0}, {"accumulates": 2}, apexs):
        model = shard(net(), mesh(world_size))
        twin = shard(net(), mesh(world_size))
        one = trained(model, level, **kwargs)
        with amp.debug.two_pass_steps():
            two = trained(twin, level, **kwargs)
        results.append(same(one, two))
    return results


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_one_pass_has_the_bits_of_two(level, on_two_ranks):
    assert on_two_ranks(both_ways, level, 2) == [[True] * 4] * 2


def norms(rank, world_size):
    """The norm of each order, and that of the gathered gradients."""
    one_pass.least_elements = 1
    results = []
    for level in ("O0", "O1", "O2", "O5"):
        for p in NORMS:
            model, optimizer = prepared(level, shard(net(), mesh(world_size)))
            backward(model, optimizer, *DATA[0])
            found = amp.clip_grad_norm_(optimizer, float("inf"), p)
            assert type(found) is torch.Tensor
            grads = wholes(param.grad for param in amp.master_params(optimizer))
            results.append((found, torch.linalg.vector_norm(_flat(grads), p)))
            amp.clip_grad_norm_(optimizer, 0.1, p)
            clipped = wholes(param.grad for param in amp.master_params(optimizer))
            shown = wholes(param.grad for param in model.parameters())
            expected = _flat(grads) * (0.1 / (found + 1e-6)).clamp(max=1.0)
            results += [(_flat(clipped), expected), (_flat(shown), expected)]
    return results


def _flat(tensors):
    return torch.cat([tensor.flatten().float() for tensor in tensors])


def test_the_norm_is_that_of_all_shards(on_four_ranks):
    """On four ranks, two hold nothing of a bias."""
    for results in on_four_ranks(norms, 4):
        for found, expected in results:
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-6)
