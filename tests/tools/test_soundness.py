"""Whether a level trains as well as fp32, judged by paired differences on the same batches."""

import functools
import math
import os

import pytest
import torch
from torch import nn

from apex.tools.compare.soundness import excess, fault
from tests.tools.cases import TARGET, by_name, compared, result_of, written

SEEDS = range(20 if os.environ.get("STRESS") else 8)
STEPS = 60


@functools.cache
def losses_of(seed, *, classes, repeated, rate=1.0, dtype=None):
    """Trains a small model with SGD at a share of the learning rate, under autocast to ``dtype``.

    Model and batches are drawn from the seed.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, classes))
    teacher = nn.Linear(16, classes)
    inputs = [torch.randn(32, 16) for _ in range(4 if repeated else STEPS)]
    labels = [teacher(x).detach() for x in inputs]
    lr, measure = 0.02, nn.functional.mse_loss
    if classes > 1:
        labels = [label.argmax(1) for label in labels]
        lr, measure = 0.3, nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * lr)
    losses = []
    for step in range(STEPS):
        x, label = inputs[step % len(inputs)], labels[step % len(inputs)]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = measure(model(x).float(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses)


def judged(losses, fp32, **changes):
    steps = (1.0,) * (len(losses) + 1)
    base = result_of("O0", losses=fp32, loss_scales=steps)
    return fault(result_of("O4", **{"losses": losses, "loss_scales": steps} | changes), base)


TASKS = pytest.mark.parametrize(
    ("classes", "repeated"), [(10, False), (10, True), (1, False), (1, True)]
)


@TASKS
def test_an_equal_level_is_never_accused(classes, repeated):
    for seed in SEEDS:
        losses = functools.partial(losses_of, seed, classes=classes, repeated=repeated)
        fp32 = losses()
        assert judged(fp32, fp32) == ""
        assert judged(losses(dtype=torch.bfloat16), fp32) == ""


@TASKS
def test_a_level_that_learns_a_tenth_more_slowly_is_found_with_the_figures(classes, repeated):
    for seed in SEEDS:
        losses = functools.partial(losses_of, seed, classes=classes, repeated=repeated)
        fp32 = losses()
        why = judged(losses(rate=0.9), fp32)
        assert why.startswith("loss "), seed
        assert " % higher on the same batches (standard error " in why
        assert judged(tuple(1.05 * loss for loss in losses(dtype=torch.bfloat16)), fp32)


@pytest.mark.parametrize("steps", [20, 60, 300])
def test_a_steep_fall_hides_nothing(steps):
    fp32 = tuple(math.exp(-5 * step / steps) for step in range(steps))
    assert judged(fp32, fp32) == ""
    assert "5.0 % higher" in judged(tuple(1.05 * loss for loss in fp32), fp32)


def test_steps_that_were_skipped_are_as_many_steps_behind():
    fp32 = tuple(math.exp(-step / 20) for step in range(STEPS))
    late = (1.0, 1.0, *fp32[:-2])
    scales = (4.0, 2.0, *(1.0,) * (STEPS - 1))
    assert judged(late, fp32, loss_scales=scales) == ""
    assert judged(late, fp32)


def test_a_step_that_was_skipped_makes_no_rising_loss_worse():
    fp32 = tuple(step / 20 for step in range(STEPS))
    ours = tuple(1.01 * loss for loss in fp32)
    assert judged(ours, fp32, loss_scales=(2.0, *(1.0,) * STEPS)) == ""


def test_the_search_for_a_loss_scale_is_no_fault_of_a_short_training():
    scales = (8.0, 4.0, 2.0, *(1.0,) * 18)
    assert judged((1.0,) * 20, (1.0,) * 20, loss_scales=scales) == ""


def test_a_loss_close_to_0_may_differ_by_what_rounding_the_outputs_explains():
    fp32 = (1.0,) * 10 + (1e-9,) * 50
    assert judged((1.0,) * 10 + (1e-5,) * 50, fp32) == ""
    assert judged((1.0,) * 10 + (1e-4,) * 50, fp32)


ACCIDENTS = {
    "few steps": (2.0,) * 19,
    "one spike": (1.001,) * (STEPS - 1) + (20.0,),
    "some steps": (*(1.0,) * 40, *(1.5,) * 14, *(0.99,) * 6),
}


@pytest.mark.parametrize("losses", ACCIDENTS.values(), ids=ACCIDENTS)
def test_a_higher_mean_alone_accuses_no_level(losses):
    assert judged(losses, (1.0,) * len(losses)) == ""


def test_updates_that_are_lost_in_fp32_too_are_no_fault():
    assert fault(result_of("O5", frozen=0.5), result_of("O0", frozen=0.5)) == ""


def test_values_that_are_not_finite_are_left_out_and_sizes_may_be_negative():
    fp32 = [-1.0] * 12
    ours = [-0.9] * 11 + [math.inf]
    found = excess(ours, fp32)
    assert (found.steps, found.worse) == (7, 7)
    assert found.share == pytest.approx(0.1)
    assert excess([1.1, -0.9] * 6, [1.0, -1.0] * 6).share == pytest.approx(0.1)
    assert excess([math.nan] * 12, fp32) is None
    assert judged([1.0] * 30 + [math.nan] + [1.0] * 29, [1.0] * 60) == ""
    nothing = excess([0.0] * 12, [0.0] * 12)
    assert (nothing.share, nothing.share_error) == (0.0, 0.0)


SLOW_AT_O5 = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
plain = loss

def loss(model, batch):
    found = plain(model, batch)
    slow = next(model.parameters()).dtype == torch.bfloat16
    return found - 0.1 * (found - found.detach()) if slow else found
"""


@pytest.mark.usefixtures("ideal_machine")
def test_compare_finds_the_level_that_learns_more_slowly(tmp_path):
    found = compared(written(tmp_path, TARGET + SLOW_AT_O5), "O4,O5", steps=STEPS, rounds=1)
    why = {verdict.level: verdict.why for verdict in found.recommendation.verdicts}
    words = {verdict.level: verdict.word for verdict in found.recommendation.verdicts}
    assert words == {"O0": "baseline", "O4": "unclear", "O5": "no"}
    assert "in 20 of the last 20 steps" in why["O5"]
    assert by_name(found)["O4"].times


@pytest.mark.usefixtures("ideal_machine")
def test_nothing_is_timed_when_no_level_trains_as_well(tmp_path):
    stages = []
    found = compared(written(tmp_path, TARGET + SLOW_AT_O5), "O5", steps=STEPS, stages=stages)
    assert stages == ["train O0", "train O5"]
    assert found.recommendation.text.startswith("Stay in fp32: none of the other levels")
