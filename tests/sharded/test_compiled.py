"""``torch.compile`` and ``fully_shard``, in either order: the bits of the same run without it."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.sharded.cases import mesh, prepared, run, shard
from tests.support.features import shards_on_cpu
from tests.training import cases

pytestmark = shards_on_cpu

STEPS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def trained(rank, level, options, where):
    try:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
        if where == "blocks":  # as torchtitan does
            compile_all(model)
        model, optimizer = prepared(level, shard(model, mesh(2)), **options)
        if where == "prepared blocks":
            compile_all(model)
        used = torch.compile(model, backend="aot_eager") if where == "model" else model
        counters.clear()
        result = run(used, optimizer, cases.batches(STEPS, seed=rank))
        return result, counters["frames"]["ok"] > 0
    finally:
        torch._dynamo.reset()


def compile_all(model):
    for block in model:
        block.compile(backend="aot_eager")


@pytest.mark.parametrize("where", ["blocks", "prepared blocks", "model"])
@pytest.mark.parametrize(("level", "options"), [("O1", {}), ("O2", {}), ("O4", {}), ("O5", {})])
def test_compiled_shards_train_bit_equal(on_two_ranks, level, options, where):
    eager = on_two_ranks(trained, level, options, "nowhere")
    for (found, compiled), (expected, _) in zip(
        on_two_ranks(trained, level, options, where), eager, strict=True
    ):
        assert compiled
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
