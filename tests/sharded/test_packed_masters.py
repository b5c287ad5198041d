"""Packed masters of sharded models, and of models under DistributedDataParallel."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.distributed import cases as replicas
from tests.sharded.cases import OPTIMIZERS, close, net, prepared, run, sharded, whole, wholes
from tests.support.features import shards_on_cpu
from tests.training.cases import batches, same

DATA = list(batches(4, overflow_at={2}))


def one_by_one(rank, optimizer):
    results = {}
    for kind in ("split", "stochastic"):
        model, own = sharded("O5", 2, OPTIMIZERS[optimizer], master_weights=kind)
        results[kind] = run(model, own, DATA)
        state = {name: whole(value) for name, value in model.state_dict().items()}
        results[f"{kind}, saved"] = list(state.values())
    return results


@shards_on_cpu
@pytest.mark.parametrize("optimizer", ["fused AdamW", "AdamW", "SGD"])
def test_sharded_halves_train_as_whole_ones(optimizer, on_two_ranks):
    alone = run(*prepared("O5", net(), OPTIMIZERS[optimizer], master_weights="split"), DATA)
    first, second = on_two_ranks(one_by_one, optimizer)
    assert close(alone["masters"], first["split"]["masters"])
    for kind in ("split", "stochastic"):
        assert same(first[kind]["masters"], first[f"{kind}, saved"])
        assert same(first[kind]["masters"], second[kind]["masters"])
        rounded = [value.to(torch.bfloat16) for value in first["stochastic"]["masters"]]
        assert same(first["stochastic"]["weights"], rounded)


def replicated(rank, kind):
    model = replicas.net(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"opt_level": "O5", "master_weights": kind, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, rounding_seed=2**64 - rank, **options)
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)
    for step in range(3):
        optimizer.zero_grad()
        replicas.backward(parallel, optimizer, *replicas.batch(rank, step))
        optimizer.step()
    return wholes(amp.master_params(optimizer)), wholes(model.parameters())


@pytest.mark.parametrize("kind", ["split", "stochastic"])
def test_replicas_of_other_seeds_hold_the_same_bits(kind, on_two_ranks):
    first, second = on_two_ranks(replicated, kind)
    assert same(first, second)
    plain, _ = on_two_ranks(replicated, True)
    if kind == "split":
        assert all(map(torch.allclose, first[0], plain[0]))
