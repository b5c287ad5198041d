"""The loss-scale rule, its device form, and what a rule may be made of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex._core.scale import (
    SMALLEST_SCALE,
    ScaleRule,
    ScaleState,
    checked_static,
    next_scale,
    update_scale_,
)
from tests.reference import loops

FLOAT32_MAX = torch.finfo(torch.float32).max


def fp32(value):
    return float(torch.tensor(value, dtype=torch.float32))


@pytest.mark.parametrize("clean_steps", [0, 1, 1999])
def test_overflow_halves_scale_and_restarts_count(clean_steps):
    before = ScaleState(2.0**16, clean_steps)
    assert next_scale(before, ScaleRule(), overflow=True) == ScaleState(2.0**15, 0)


@pytest.mark.parametrize("clean_steps", [0, 1998])
def test_a_clean_step_below_the_interval_only_counts(clean_steps):
    before = ScaleState(2.0**16, clean_steps)
    after = ScaleState(2.0**16, clean_steps + 1)
    assert next_scale(before, ScaleRule(), overflow=False) == after


def test_the_last_clean_step_of_the_interval_doubles_and_restarts_count():
    before = ScaleState(2.0**16, 1999)
    assert next_scale(before, ScaleRule(), overflow=False) == ScaleState(2.0**17, 0)


def test_the_scale_never_falls_below_the_smallest_normal_number():
    state = ScaleState(SMALLEST_SCALE, 0)
    assert next_scale(state, ScaleRule(), overflow=True).scale == SMALLEST_SCALE
    assert math.isfinite(fp32(1 / SMALLEST_SCALE))


def test_the_scale_never_grows_to_inf():
    rule = ScaleRule(growth_interval=1)
    assert next_scale(ScaleState(FLOAT32_MAX, 0), rule, overflow=False).scale == FLOAT32_MAX


def test_growth_at_the_ceiling_restarts_the_count():
    rule = ScaleRule(growth_interval=2, ceiling=8.0)
    assert next_scale(ScaleState(8.0, 1), rule, overflow=False) == ScaleState(8.0, 0)


bounds = st.one_of(st.none(), st.floats(2.0**-20, 2.0**20, width=32))


@st.composite
def rules(draw):
    floor, ceiling = draw(bounds), draw(bounds)
    if floor is not None and ceiling is not None and floor > ceiling:
        floor, ceiling = ceiling, floor
    return ScaleRule(
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5, 1.0009765625])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.75])),
        growth_interval=draw(st.integers(1, 5)),
        floor=floor,
        ceiling=ceiling,
    )


@given(rules(), st.lists(st.booleans(), max_size=60), st.floats(2.0**-130, 2.0**127, width=32))
def test_the_device_form_follows_the_plain_rule_bit_for_bit(rule, overflows, start):
    state = ScaleState(start, 0)
    scale = torch.tensor(start, dtype=torch.float32)
    clean_steps = torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        plain = next_scale(state, rule, overflow=overflow)
        state = ScaleState(fp32(plain.scale), plain.clean_steps)
        update_scale_(scale, clean_steps, torch.tensor(float(overflow)), rule)
        assert ScaleState(float(scale), int(clean_steps)) == state


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_the_plain_rule_equals_the_one_written_by_hand(overflows, interval):
    rule = ScaleRule(growth_interval=interval, floor=2.0**10, ceiling=2.0**20)
    state = by_hand = ScaleState(2.0**16, 0)
    for overflow in overflows:
        state = next_scale(state, rule, overflow=overflow)
        by_hand = loops.next_scale(
            *by_hand, overflow=overflow, interval=interval, least=2.0**10, greatest=2.0**20
        )
        assert state == by_hand


@given(rules(), st.lists(st.booleans(), max_size=60), st.floats(2.0**-130, 2.0**127, width=32))
def test_the_scale_stays_within_its_bounds(rule, overflows, start):
    state = ScaleState(start, 0)
    for overflow in overflows:
        state = next_scale(state, rule, overflow=overflow)
        assert 0.0 < rule.least <= state.scale <= rule.greatest < math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_factor": 1.0}, r"growth_factor is 1\.0; it must be above 1\."),
        ({"growth_factor": math.nan}, r"growth_factor is nan; it must be above 1\."),
        ({"backoff_factor": 0.0}, r"backoff_factor is 0\.0; it must be in \(0, 1\)\."),
        ({"backoff_factor": 1.0}, r"backoff_factor is 1\.0; it must be in \(0, 1\)\."),
        ({"growth_interval": 0}, r"growth_interval is 0; it must be at least 1\."),
        ({"floor": 0.0}, r"min_loss_scale is 0\.0; it must be a positive number or None\."),
        ({"ceiling": -1.0}, r"max_loss_scale is -1\.0; it must be a positive number or None\."),
        ({"floor": 4.0, "ceiling": 2.0}, r"min_loss_scale is 4\.0; it must be at most 2\.0\."),
    ],
)
def test_a_rule_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ScaleRule(**options)


@pytest.mark.parametrize("loss_scale", [0.0, -1.0, math.inf, math.nan])
def test_a_static_scale_that_is_not_positive_and_finite_is_refused(loss_scale):
    with pytest.raises(ValueError, match="must be a positive, finite number"):
        checked_static(loss_scale)


def test_a_positive_finite_static_scale_comes_back():
    assert checked_static(128.0) == 128.0
