"""Tools whose verdicts on one rank must not change what it exchanges with the others."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedLAMB
from apex.parallel import SyncBatchNorm
from tests.features import shards_on_cpu
from tests.sharded.cases import mesh, net, shard
from tests.training.cases import batch

pytestmark = pytest.mark.distributed


def refused(rank, called):
    """The error of ``suggest_fp32``, called on every rank or on the first one."""
    model = nn.Sequential(nn.Linear(8, 8), SyncBatchNorm(8), nn.Linear(8, 1))
    if rank and called == "on the first rank":
        return True
    with pytest.raises(ValueError, match=r"exchanges values with other processes \(c10d\."):
        amp.debug.suggest_fp32(model, torch.randn(16, 8))
    own = nn.Linear(8, 1)
    return amp.debug.suggest_fp32(own, torch.randn(16 + rank, 8)).modules == []


@pytest.mark.parametrize("called", ["on every rank", "on the first rank"])
def test_suggest_fp32_takes_no_model_that_communicates(on_two_ranks, called):
    assert on_two_ranks(refused, called) == [True] * 2


OPTIMIZERS = {
    "FusedLAMB": lambda params: FusedLAMB(params, max_grad_norm=0.1),  # with a norm over ranks
    "AdamW": torch.optim.AdamW,
}


def frozen_with_nan_on_the_last_rank(rank, kind, level):
    model = shard(net(), mesh(2))
    optimizer = OPTIMIZERS[kind](model.parameters())
    options = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    x, y = batch()
    found = []
    for spoiled in (True, False):
        loss = nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if spoiled and rank == 1:
                model[0].weight.grad.to_local()[0] = float("nan")
        with amp.debug.frozen_updates(optimizer) as updates:
            optimizer.step()
        optimizer.zero_grad()
        found.append((updates.wanted > 0, updates.frozen))
    return found


@shards_on_cpu
@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_of_a_sharded_model_freezes_nothing_on_any_rank(on_two_ranks, kind, level):
    expected = [(False, 0), (True, 0)]
    assert on_two_ranks(frozen_with_nan_on_the_last_rank, kind, level) == [expected] * 2
