"""Traces of sharded models: DTensor computes shapes by operators, which hold no values."""

import pytest
import torch

from apex import amp
from tests.sharded.cases import sharded
from tests.support.features import shards_on_cpu
from tests.training.cases import batch

pytestmark = shards_on_cpu


def iteration(model, optimizer, x, y):
    loss = torch.nn.functional.mse_loss(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def findings(rank, level, world_size):
    """What each tool says of an iteration; the weights of layer 2 overflow in the second one."""
    model, optimizer = sharded(level, world_size)
    x, y = batch()
    with amp.debug.trace_overflow(model) as clean:
        iteration(model, optimizer, x, y)
    with amp.debug.trace_rounding(model) as rounding:
        iteration(model, optimizer, x, y)
    explained = {row.name for row in amp.debug.explain(model, x).modules}
    with torch.no_grad():
        for master in list(amp.master_params(optimizer))[2:]:
            master.copy_(torch.full_like(master, 3e38))
    with amp.debug.trace_overflow(model) as trace:
        iteration(model, optimizer, x, y)
    traced = {row.module for row in rounding.rows}
    return clean.first is None, traced >= {"0", "2"}, explained, trace.first.module


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_layer_of_a_sharded_model_is_named(level, on_two_ranks):
    expected = (True, True, {"", "0", "1", "2"}, "2")
    assert on_two_ranks(findings, level, 2) == [expected] * 2
