"""Meshes on four ranks: HSDP, tensor parallel, and both with FSDP2; norms over sharded parts."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from apex import amp
from apex.optimizers import FusedLAMB
from tests.support import loops
from tests.support.features import (
    averages_on_cpu,
    replicas_on_cpu,
    shards_on_cpu,
    unbinds_dtensors,
)
from tests.support.loops import same, scaled_backward
from tests.support.sharding import mesh, net, shard, whole

pytestmark = [pytest.mark.distributed, shards_on_cpu]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def hsdp(model, policy):
    shard(model, mesh(2, 2, names=("replicate", "shard")), mp_policy=policy)


def tensor_parallel(model, policy):
    _split(model, mesh(4))


def both(model, policy):
    plane = mesh(2, 2, names=("data", "model"))
    _split(model, plane["model"])
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=plane["data"], mp_policy=policy)


def _split(model, over):
    parallelize_module(model, over, {"0": ColwiseParallel(), "2": RowwiseParallel()})


PARALLEL = {"HSDP": hsdp, "TP": tensor_parallel, "TP + FSDP2": both}


def trained_on(rank, parallel, level, amps):
    """Whole weights after some steps at a level, or without amp under ``torch.autocast``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    PARALLEL[parallel](model, BF16 if level == "O0" else MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if amps:
        options = {"loss_scale": 1.0} if level == "O1" else {}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    dtype = {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
    # Ranks of one tensor-parallel group have the same batch.
    seed = {"HSDP": rank, "TP": 0, "TP + FSDP2": rank // 2}[parallel]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        x = torch.randn(3, 4, generator=generator)
        with torch.autocast("cpu", dtype, enabled=not amps and dtype is not None):
            loss = model(x).float().square().mean()
        if amps:
            scaled_backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@loops.every(
    level=["O0", "O1", "O4"],
    parallel=[pytest.param("HSDP", marks=replicas_on_cpu), "TP", "TP + FSDP2"],
)
def test_every_mesh_trains_as_without_amp(on_ranks, parallel, level):
    expected = on_ranks(4, trained_on, parallel, level, False)
    found = on_ranks(4, trained_on, parallel, level, True)
    if level == "O0":
        assert same(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=8e-3)


def overflow_in_one_part(rank, parallel):
    """The optimizer's first parameter is sharded over fewer ranks than others."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    PARALLEL[parallel](model, MixedPrecisionPolicy())
    optimizer = loops.sgd(reversed([*model.parameters()]))
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, max_loss_scale=2.0**8)
    with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        if rank == 3:
            model[0].weight.grad.to_local().fill_(torch.inf)
    optimizer.step()
    return amp.step_was_skipped(optimizer, on_host=True)


@pytest.mark.parametrize("parallel", ["TP", "TP + FSDP2"])
def test_an_overflow_in_one_part_skips_on_all_ranks(on_ranks, parallel):
    assert on_ranks(4, overflow_in_one_part, parallel) == [True] * 4


def overflow_in_one_summand(rank):
    """Ranks have parts of a sequence, and summands of a norm's gradients."""
    norm = parallelize_module(nn.LayerNorm(4), mesh(2), SequenceParallel())
    optimizer = loops.sgd(norm.parameters())
    amp.initialize(norm, optimizer, opt_level="O1", verbosity=0)
    factor = torch.inf if rank == 1 else 1.0
    scaled_backward(norm(torch.ones(1, 1, 4)).to_local().sum() * factor, optimizer)
    optimizer.step()
    return amp.step_was_skipped(optimizer, on_host=True)


def test_an_overflow_in_one_summand_skips_on_all_ranks(on_two_ranks):
    assert on_two_ranks(overflow_in_one_summand) == [True] * 2


OPTIMIZERS = {"LAMB": FusedLAMB, "AdamW": torch.optim.AdamW}


def clipped_and_trained(rank, kind, shape):
    """Norms and weights after steps on the same data; without a shape nothing is sharded."""
    model = net()
    if shape:
        shard(model, mesh(*shape, names=("replicate", "shard")[-len(shape) :]))
    model, optimizer = loops.prepared("O0", OPTIMIZERS[kind], model)
    norms = []
    for x, y in loops.batches(3):
        optimizer.zero_grad()
        loops.backward(model, optimizer, x, y)
        norms.append(float(amp.clip_grad_norm_(optimizer, 0.1)))
        optimizer.step()
    return torch.tensor(norms), whole(model)


@averages_on_cpu
@loops.every(shape=[(2,), (2, 2)], kind=[pytest.param("LAMB", marks=unbinds_dtensors), "AdamW"])
def test_clips_and_steps_by_norms_are_those_of_the_whole_model(on_ranks, kind, shape):
    ranks = 2 * len(shape)
    for found in on_ranks(ranks, clipped_and_trained, kind, shape):
        torch.testing.assert_close(found, clipped_and_trained(0, kind, None))
