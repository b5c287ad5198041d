"""Activation checkpointing under ``fully_shard`` recomputes in the dtypes of the forward pass."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.sharded.cases import mesh, prepared, wholes
from tests.support.features import shards_on_cpu
from tests.training.cases import MIXED, backward, batch

pytestmark = shards_on_cpu

KINDS = ("not reentrant", "reentrant", "wrapper")


class Block(nn.Module):
    """Ops of every row of the op table, and the dtypes that they ran in."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.seen = []

    def forward(self, x):
        self.seen += [x.dtype, self.linear.weight.dtype]
        hidden = self.linear(x)
        self.seen.append(hidden.dtype)
        hidden = torch.softmax(hidden, dim=-1)
        self.seen.append(hidden.dtype)
        return self.norm(hidden) + x


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        block = Block(6)
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        self.block = wrapped if kind == "wrapper" else block
        self.blocks = [block]

    def forward(self, x):
        x = self.first(x)
        if self.kind in ("plain", "wrapper"):
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x, use_reentrant=self.kind == "reentrant"))


def gradients(level, kind):
    torch.manual_seed(0)
    model = Net(kind)
    fully_shard(model.block, mesh=mesh(2))
    model, optimizer = prepared(level, fully_shard(model, mesh=mesh(2)))
    backward(model, optimizer, *batch())
    return model.blocks[0].seen, wholes(param.grad for param in model.parameters())


def recomputed(rank, level):
    plain = gradients(level, "plain")
    found = {}
    for kind in KINDS:
        seen, grads = gradients(level, kind)
        found[kind] = seen == plain[0] * 2, [*map(torch.equal, grads, plain[1])]
    return found


@pytest.mark.parametrize("level", MIXED)
def test_recomputes_in_the_same_dtypes(level, on_two_ranks):
    for found in on_two_ranks(recomputed, level):
        assert found == dict.fromkeys(KINDS, (True, [True] * 8))
