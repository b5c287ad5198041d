"""The wrapper under MMEngine's DistributedDataParallel, two processes on gloo."""

import pytest
import torch
from torch.testing import assert_close

from apex import amp
from tests.package.mmengine_cases import (
    LEVELS,
    Ours,
    batch,
    loss_of,
    net,
    sgd,
    values,
    wrapped,
)

pytestmark = [pytest.mark.clients, pytest.mark.distributed]


def train(rank, level):
    """Two updates of two accumulated iterations each; the ranks see different data."""
    from mmengine.model import MMDistributedDataParallel

    model = net(seed=rank)  # DDP takes rank 0's values to all
    parallel = MMDistributedDataParallel(model)
    _, wrapper = wrapped(Ours, level, model=model, accumulative_counts=2)
    for step in range(4):
        with wrapper.optim_context(parallel):
            output = parallel(batch(10 * rank + step))
        wrapper.update_params(output.float().pow(2).mean())
    return [value.tolist() for value in values(wrapper)]


def train_on_the_data_of_both(level):
    """The same updates in one process."""
    model = net()
    model, optimizer = amp.initialize(
        model, sgd(model), opt_level=level, loss_scale=2.0**8, verbosity=0
    )
    for first in (0, 2):
        for number in (first, first + 1, 10 + first, 10 + first + 1):
            with amp.scale_loss(loss_of(model, batch(number)) / 4, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_stay_together_and_learn_from_the_data_of_both(on_two_ranks, level):
    first, second = on_two_ranks(train, level)
    assert first == second
    low = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
    eps = torch.finfo(low.get(level, torch.float32)).eps
    for ours, together in zip(first, train_on_the_data_of_both(level), strict=True):
        assert_close(torch.tensor(ours), together, rtol=4 * eps, atol=4 * eps)
