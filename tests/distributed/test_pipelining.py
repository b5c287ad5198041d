"""Pipeline parallelism: torch's schedules run the backward pass, and bf16 needs no scale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from apex import amp
from tests.support.features import pipelines_on_cpu
from tests.support.loops import prepared

pytestmark = [pytest.mark.distributed, pipelines_on_cpu]

LEVELS = ("O0", "O1", "O2", "O4", "O5")
STEPS = 6


def stage(rank):
    torch.manual_seed(rank)
    width = 4 if rank else 16
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, width))


def rows_and_labels():
    torch.manual_seed(2)
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def loss_of(output, labels):
    return F.cross_entropy(output.float(), labels)


def train_stage(rank, level):
    """Returns this rank's weights after training its stage."""
    model = stage(rank)
    model, optimizer = prepared(
        level, lambda p: torch.optim.AdamW(p, lr=1e-2), model, loss_scale=1.0
    )
    own = PipelineStage(model, rank, 2, torch.device("cpu"))
    run = ScheduleGPipe(own, n_microbatches=4, loss_fn=loss_of)
    x, labels = rows_and_labels()
    for _ in range(STEPS):
        run.step(target=labels) if rank else run.step(x)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in amp.master_params(optimizer)]


def in_one_process():
    models = [stage(0), stage(1)]
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    x, labels = rows_and_labels()
    for _ in range(STEPS):
        loss_of(models[1](models[0](x)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params]


@pytest.mark.parametrize("level", LEVELS)
def test_stages_train_as_one_model_in_fp32(on_two_ranks, level):
    found = torch.cat([*map(flat, on_two_ranks(train_stage, level))])
    expected = flat(in_one_process())
    start = flat([param for rank in (0, 1) for param in stage(rank).parameters()])
    tolerance = 1e-5 if level == "O0" else 0.05
    assert (found - expected).norm() <= tolerance * (expected - start).norm()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
