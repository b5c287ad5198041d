"""fairscale 0.4.13: SlowMo, which writes to the weights and the masters through ``_amp_stash``."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from apex import amp
from tests.clients.classes import LEVELS, labelled_rows
from tests.clients.libraries import need, of_its_time
from tests.support.loops import every, values

data_parallel = need("fairscale.experimental.nn.data_parallel")

pytestmark = [*of_its_time, pytest.mark.distributed]


@contextlib.contextmanager
def on_the_cpu():
    """Lets fairscale wait for a GPU that is not there; its deprecations are its own business."""
    with warnings.catch_warnings(), mock.patch("torch.cuda.synchronize"):
        warnings.simplefilter("ignore")
        yield


def train_rank(rank, level, options):
    """Trains on the rank's own data; returns what the optimizer steps, the weights and losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    with on_the_cpu():
        net = data_parallel.SlowMoDistributedDataParallel(model, nprocs_per_node=1, **options)
        for index in range(16):
            x, y = labelled_rows(4 * rank + index % 4)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x).float(), y)
            if level:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            net.perform_slowmo(optimizer)
            losses.append(loss.item())
    stepped = optimizer.param_groups[0]["params"]
    return values(stepped), values(model.parameters()), losses


WAYS = {
    "slow momentum": {"slowmo_memory_efficient": True},
    "slow momentum in every rank": {"slowmo_memory_efficient": False},
    "averages": {"slowmo_momentum": 0.0},  # of the 16-bit weights, with fp32 error feedback
}


@every(way=WAYS, level=LEVELS)
def test_slowmo_trains_as_in_fp32(on_two_ranks, level, way):
    options = {"localsgd_frequency": 2, "slowmo_frequency": 4, "slowmo_num_shards": 2, **WAYS[way]}
    trained = on_two_ranks(train_rank, level, options)
    expected = on_two_ranks(train_rank, None, options)
    eps = {"O0": 0, "O1": 2.0**-10, "O2": 2.0**-10, "O5": 2.0**-7}[level]
    for (stepped, weights, losses), (exact, _, in_fp32) in zip(trained, expected, strict=True):
        assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
        assert_close(losses, in_fp32, rtol=8 * eps, atol=0)
        assert_close(stepped, exact, rtol=0, atol=4 * eps)
        assert_close(weights, [master.to(weights[0].dtype) for master in stepped], rtol=0, atol=0)
    if way != "slow momentum in every rank":  # there, ranks differ in fp32, too
        assert_close(trained[0][1], trained[1][1], rtol=0, atol=eps)
