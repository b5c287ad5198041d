"""How the loss scale moves, and what it says when it moves down for good."""

import pytest
import torch

from apex import amp
from tests.support import loops

OK, INF = 1e-3, float("inf")


FACTORS = {"growth_interval": 1, "growth_factor": 4.0, "backoff_factor": 0.125}
HISTORIES = {
    "grows": ({"growth_interval": 3}, [OK] * 7, [16, 16, 17, 17, 17, 18, 18]),
    "counts anew": ({"growth_interval": 3}, [OK, OK, INF, OK, OK, OK], [16, 16, 15, 15, 15, 16]),
    "factors": (FACTORS, [OK, INF], [18, 15]),
    "most": ({"growth_interval": 1, "max_loss_scale": 2.0**17}, [OK] * 3, [17] * 3),
    "2 to 24": ({"growth_interval": 1, "level": "O4"}, [OK] * 10, [*range(17, 25), 24, 24]),
    "least": ({"min_loss_scale": 2.0**15}, [INF] * 3, [15] * 3),
    "string": ({"loss_scale": "128.0"}, [OK, INF], [7, 7]),
    "number": ({"loss_scale": 64}, [OK, INF], [6, 6]),
}


@pytest.mark.parametrize(("options", "gradients", "exponents"), HISTORIES.values(), ids=HISTORIES)
def test_the_scale_follows_the_gradients(options, gradients, exponents):
    model, optimizer = loops.one_weight(**{"level": "O1", "loss_scale": "dynamic", **options})
    for gradient, exponent in zip(gradients, exponents, strict=True):
        loops.descend(loops.slope(model, gradient), optimizer)
        assert loops.loss_scale() == 2.0**exponent


def test_the_scale_doubles_after_exactly_2000_clean_steps():
    model, optimizer = loops.one_weight("O1")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._unskipped = 1997
    found = []
    for _ in range(4):
        loops.descend(loops.slope(model, OK), optimizer)
        found.append((loops.loss_scale(), scaler._unskipped))
    assert found == [(2.0**16, 1998), (2.0**16, 1999), (2.0**17, 0), (2.0**17, 1)]


@pytest.mark.parametrize(("name", "value"), [("_scale_seq_len", 2), ("_unskipped", 9)])
def test_a_script_that_sets_the_count_past_the_interval_grows_the_scale_at_the_next_step(
    name, value
):
    model, optimizer = loops.one_weight("O1", growth_interval=5)
    for _ in range(3):
        loops.descend(loops.slope(model, OK), optimizer)
    setattr(amp._amp_state.loss_scalers[0], name, value)
    loops.descend(loops.slope(model, OK), optimizer)
    assert (loops.loss_scale(), loops.unskipped()) == (2.0**17, 0)


def test_a_start_outside_the_bounds_is_moved_inside():
    for bound in ({"max_loss_scale": 2.0**10}, {"min_loss_scale": 2.0**20}):
        kept = loops.one_weight("O1", **bound)
        assert loops.scale() in bound.values()
        del kept


def test_a_static_scale_divides_by_what_it_multiplied_with():
    model, optimizer = loops.one_weight("O0", loss_scale="48.0")
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
        assert scaled_loss == model.weight.sum() * 48
        scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 1), rtol=2**-23, atol=0.0)


@pytest.mark.parametrize("level", loops.LEVELS)
def test_a_scale_that_a_script_sets_counts_each_gradient_once(level):
    model, optimizer = loops.one_weight(level)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    for _ in range(2):
        loops.scaled_backward(loops.slope(model, 1.0), optimizer)
    optimizer.step()
    assert model.weight.item() == 0.75
