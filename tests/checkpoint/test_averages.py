"""Averages of a prepared model's weights (``torch.optim.swa_utils``): the supported way.

An average in 16 bits stands still where updates are small, so at O2, O3 and O5 it is made of a
plain fp32 twin that takes the model's ``state_dict``, which holds the masters' values.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from apex import amp
from tests.support import loops

DECAY = 0.75


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def exact(model, optimizer):
    """Parameters and buffers in fp32, parameters by their masters where there are any."""
    stepped = [param.detach().float().clone() for param in amp.master_params(optimizer)]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return stepped + [b.float() if b.is_floating_point() else b for b in buffers]


def twin_before(model, optimizer, level):
    twin = copy.deepcopy(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return twin


def twin_after(model, optimizer, level):
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return amp.restore(copy.deepcopy(model))


def averaged_run(level, make_twin):
    """Trains and averages; returns the average and what it was made of, step by step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = make_twin(model, optimizer, level)
    average = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    history = []
    for x, y in loops.batches(4):
        loops.train_step(model, optimizer, x, y)
        twin.load_state_dict(model.state_dict())
        average.update_parameters(twin)
        history.append(exact(model, optimizer))
    return average, history


@pytest.mark.parametrize("make_twin", [twin_before, twin_after])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_average_of_a_twin_is_the_fp32_average_of_the_masters(level, make_twin):
    average, history = averaged_run(level, make_twin)
    expected, average_step = history[0], get_ema_multi_avg_fn(DECAY)
    for values in history[1:]:
        for old, new in zip(expected, values, strict=True):
            average_step([old], [new], None)
    found = [*average.module.parameters(), *average.module.buffers()]
    assert loops.same(expected, [tensor.detach() for tensor in found])
