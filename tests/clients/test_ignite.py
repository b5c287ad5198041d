"""PyTorch-Ignite's trainer with ``amp_mode="apex"``."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from apex import amp
from tests.clients.libraries import need

need("ignite.engine")

pytestmark = pytest.mark.clients

LEVELS = ("O0", "O1", "O2", "O4", "O5")
EXACT = {"rtol": 0, "atol": 0}


def prepared(level):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    options = {"opt_level": level, "loss_scale": 2.0**8, "verbosity": 0}
    return amp.initialize(model, optimizer, **options)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    shapes = (8, 4), (8, 2)
    return [tuple(torch.randn(each, generator=generator) for each in shapes) for _ in range(count)]


def squared_error(output, target):
    return F.mse_loss(output.float(), target)


def trained_by_ignite(level, data, **options):
    from ignite.engine import create_supervised_trainer

    model, optimizer = prepared(level)
    trainer = create_supervised_trainer(
        model, optimizer, squared_error, device="cpu", amp_mode="apex", **options
    )
    trainer.run(data, max_epochs=1)
    return [param.detach() for param in amp.master_params(optimizer)]


def trained_by_hand(level, data, accumulate=1):
    model, optimizer = prepared(level)
    for index, (x, y) in enumerate(data):
        if index % accumulate == 0:
            optimizer.zero_grad()
        loss = squared_error(model(x), y) / accumulate
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
    return [param.detach() for param in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", LEVELS)
def test_ignite_trains_as_the_three_lines_do(level):
    data = batches(3)
    assert_close(trained_by_ignite(level, data), trained_by_hand(level, data), **EXACT)


@pytest.mark.parametrize("level", LEVELS)
def test_ignite_accumulates_as_the_three_lines_do(level):
    data = batches(4)
    by_ignite = trained_by_ignite(level, data, gradient_accumulation_steps=2)
    assert_close(by_ignite, trained_by_hand(level, data, accumulate=2), **EXACT)
