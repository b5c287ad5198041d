"""What amp costs: host syncs per iteration, and stored bytes per parameter."""

import pytest
import torch

from tests.support import loops
from tests.support.host_reads import reads_of, waits_are_errors

FUSED = {
    "Adam": lambda params: torch.optim.Adam(params, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("level", loops.MIXED)
def test_an_iteration_with_a_fused_optimizer_has_no_host_read(level, name):
    for loss_scale in (None, "dynamic"):
        pair = loops.prepared(level, FUSED[name], loss_scale=loss_scale)
        assert reads_of(*pair, loops.train_step) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("level", loops.MIXED)
def test_an_iteration_with_a_fused_optimizer_never_waits_for_the_gpu(level, name):
    model, optimizer = loops.prepared(level, FUSED[name], model=loops.net().cuda())
    data = [(x.cuda(), y.cuda()) for x, y in loops.batches(5)]
    for x, y in data[:2]:
        loops.train_step(model, optimizer, x, y)
    with waits_are_errors():
        for x, y in data[2:]:
            loops.train_step(model, optimizer, x, y)
