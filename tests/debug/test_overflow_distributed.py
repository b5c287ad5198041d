"""The trace of a model under DistributedDataParallel, and of a sharded one."""

import logging
from logging.handlers import BufferingHandler

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.debug.overflow import trace_overflow
from tests.debug.bodies import overflowing_net
from tests.support.features import shards_on_cpu
from tests.support.loops import descend, prepared
from tests.support.memory import new_memory_holds_nan

pytestmark = pytest.mark.distributed


def armed(rank):
    model, optimizer = prepared("O1", model=overflowing_net())
    called = DistributedDataParallel(model)
    handler = BufferingHandler(capacity=100)
    logging.getLogger("apex").addHandler(handler)
    amp.debug.arm(optimizer, after_skips=1)
    with new_memory_holds_nan():  # where buckets of DDP are
        for _ in range(2):
            x = torch.full((1, 2), 2.0 if rank else 0.01)
            descend(called(x).float().sum() / 2**10, optimizer)
    return [record.getMessage() for record in handler.buffer]


def test_a_rank_that_overflows_alone_is_heard(on_two_ranks):
    (of_0,), (of_1,) = on_two_ranks(armed)
    assert "another rank" in of_0
    assert "First overflow: aten.exp in 1, forward" in of_1
    assert "cause  range: " in of_1


def first_of_plain_ranks(rank, exchange):
    model = overflowing_net()
    called = DistributedDataParallel(model) if exchange == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace_overflow(model) as trace:
        called(torch.full((1, 2), 1.0 if rank else 0.01)).sum().backward()
        if exchange == "by hand":
            for param in model.parameters():
                torch.distributed.all_reduce(param.grad)
        optimizer.step()
    return trace.first.cause, trace.first.op, sorted(trace.gradients)


@pytest.mark.parametrize("exchange", ["DDP", "by hand"])
def test_the_rank_that_only_receives_the_values_blames_no_data_of_its_own(on_two_ranks, exchange):
    (cause_0, _, _), of_1 = on_two_ranks(first_of_plain_ranks, exchange)
    assert cause_0 == "another rank"
    assert of_1 == ("range", "aten.exp", ["0.bias", "0.weight"])


def first_when_sharded(rank):
    model = overflowing_net()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    with trace_overflow(model) as trace:
        model(torch.ones(1, 2)).sum().backward()
    return trace.first.op, trace.first.module, trace.first.direction


@shards_on_cpu
def test_a_sharded_model_is_traced_on_every_rank(on_two_ranks):
    assert on_two_ranks(first_when_sharded) == [("aten.exp", "1", "forward")] * 2


def first_of_received(rank):
    model = nn.Linear(2, 2)
    received = torch.full((4,), float("nan" if rank else 0))  # as memory of torch.empty may be
    with trace_overflow(model) as trace:
        torch.distributed.all_gather_into_tensor(received, torch.ones(2))
        model(received.reshape(2, 2))
    return trace.first, received.tolist()


def test_memory_that_a_collective_overwrites_is_no_input(on_two_ranks):
    assert on_two_ranks(first_of_received) == [(None, [1.0] * 4)] * 2
