"""Under another default dtype nothing changes but the dtype of new parameters."""

import pytest
import torch

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.support import loops


@pytest.fixture
def fp32_again():
    yield
    torch.set_default_dtype(torch.float32)


FUSED = {
    "torch's AdamW": loops.fused_adamw_of,
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
}


@pytest.mark.usefixtures("fp32_again")
@loops.every(dtype=[torch.bfloat16, torch.float64], level=loops.LEVELS)
def test_training_at_a_level_is_the_same(level, dtype):
    model, data = loops.net(), list(loops.batches(4, overflow_at={1}))
    start = loops.values(model.parameters())

    def run(make):
        loops.change(model.parameters(), start, "data")
        scale = "dynamic" if level in ("O1", "O2") else 8.0
        _, optimizer = loops.prepared(level, make, model, loss_scale=scale)
        found = []
        for x, y in data:
            found.append(loops.backward(model, optimizer, x, y))
            found.append(amp.clip_grad_norm_(optimizer, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        found += [amp.step_was_skipped(optimizer), loops.masters(optimizer)]
        found += [optimizer.state_dict()["state"], amp.state_dict()]
        found.append(loops.values(model.parameters()))
        amp.restore(model, optimizer)
        return found

    expected = [*map(run, FUSED.values())]
    torch.set_default_dtype(dtype)
    assert loops.same([*map(run, FUSED.values())], expected)
