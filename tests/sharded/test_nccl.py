"""What NCCL carries on GPUs: gradients, masters and overflow flags; the same over gloo here."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from benchmarks.counting import refused_syncs
from tests.sharded.cases import wholes
from tests.support.features import shards_on_cpu
from tests.support.ranks import Ranks
from tests.training import cases

pytestmark = pytest.mark.distributed
NCCL = pytest.mark.gpu(kernels="NCCL sends")
TWO_GPUS = pytest.mark.gpu(kernels="NCCL sends", devices=2)
GROUPS = [
    pytest.param(("gloo", 2), id="gloo-2"),
    pytest.param(("nccl", 1), id="nccl-1", marks=NCCL),
    pytest.param(("nccl", 2), id="nccl-2", marks=TWO_GPUS),
]


@pytest.fixture(params=GROUPS, scope="module")
def on_ranks(request, tmp_path_factory):
    """Calls ``fn(rank, device type, *args)`` in every process of the group."""
    backend, world_size = request.param
    ranks = Ranks(world_size, backend)
    store = tmp_path_factory.mktemp(backend) / "store"
    device = "cuda" if backend == "nccl" else "cpu"
    yield lambda fn, *args: ranks.run(store, functools.partial(fn, device=device), *args)
    ranks.stop()


def wrapped(level, device, wrapper):
    model = cases.net().to(device)
    if wrapper == "fully_shard":
        fully_shard(model, mesh=init_device_mesh(device, (torch.distributed.get_world_size(),)))
    options = {"loss_scale": "dynamic", "max_loss_scale": 2.0**8}
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["fused AdamW"], model, **options)
    return (DistributedDataParallel(model) if wrapper == "DDP" else model), optimizer


def train(rank, level, wrapper, device):
    """Six steps, the fourth with an inf in the data of the last rank; no wait after the second.

    Returns the masters, the scale, and whether the fourth step moved anything.
    """
    model, optimizer = wrapped(level, device, wrapper)
    last = rank == torch.distributed.get_world_size() - 1
    batches = [
        (x.to(device), y.to(device))
        for x, y in cases.batches(6, overflow_at={3} if last else (), seed=rank)
    ]
    moved = None
    for step, (x, y) in enumerate(batches):
        before = wholes(amp.master_params(optimizer)) if step == 3 else None
        if step < 2:
            cases.train_step(model, optimizer, x, y)
        else:
            with refused_syncs():
                cases.train_step(model, optimizer, x, y)
        if step == 3:
            moved = not cases.same(before, wholes(amp.master_params(optimizer)))
    values = [master.tolist() for master in wholes(amp.master_params(optimizer))]
    return values, cases.loss_scale(), moved


@pytest.mark.parametrize("wrapper", ["DDP", pytest.param("fully_shard", marks=shards_on_cpu)])
@pytest.mark.parametrize("level", cases.MIXED)
def test_an_overflow_of_one_rank_is_skipped_by_all_without_a_wait(on_ranks, level, wrapper):
    first, *others = on_ranks(train, level, wrapper)
    assert all(other == first for other in others)
    values, scale, moved = first
    assert (scale, moved) == (2.0**7, False)
    assert torch.tensor(values[0]).isfinite().all()
