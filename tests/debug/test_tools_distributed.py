"""Tools whose verdicts on one rank must not change what it exchanges with the others."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedLAMB
from tests.features import shards_on_cpu
from tests.sharded.cases import mesh, net, shard
from tests.training.cases import batch

pytestmark = pytest.mark.distributed


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
