"""The loss-scale rule, its device form, and what a rule may be made of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex._core.scale import SMALLEST_SCALE, ScaleRule, ScaleState, next_scale
from apex._engine.scaler import DynamicScaler

FLOAT32_MAX = torch.finfo(torch.float32).max


def fp32(value):
    return float(torch.tensor(value, dtype=torch.float32))


@pytest.mark.parametrize("scale", [2.0**127, FLOAT32_MAX])
def test_a_scale_that_would_grow_to_inf_stays(scale):
    rule = ScaleRule(growth_interval=1, max_scale=None)
    assert next_scale(ScaleState(scale, 0), rule, overflow=False).scale == scale


bounds = st.one_of(st.none(), st.floats(2.0**-20, 2.0**20, width=32), st.floats(1e-44, 1e300))


@st.composite
def rules(draw):
    lowest, highest = draw(bounds), draw(bounds)
    if highest is not None:
        highest = max(highest, SMALLEST_SCALE)
    if lowest is not None:
        lowest = min(lowest, FLOAT32_MAX, math.inf if highest is None else highest)
    return ScaleRule(
        growth_factor=draw(st.sampled_from([2.0, 1.5]) | st.floats(1.0, 1e9, exclude_min=True)),
        backoff_factor=draw(st.sampled_from([0.5]) | st.floats(1e-9, 0.999)),
        growth_interval=draw(st.integers(1, 5) | st.just(2**40)),
        min_scale=lowest,
        max_scale=highest,
    )


scales = st.floats(SMALLEST_SCALE, FLOAT32_MAX, width=32)


@given(rules(), st.lists(st.booleans(), max_size=60), scales, st.integers(0, 2**31 - 1))
def test_the_device_form_follows_the_plain_rule_bit_for_bit(rule, overflows, scale, growth_tracker):
    growth_tracker %= rule.growth_interval
    state, scaler = ScaleState(scale, growth_tracker), DynamicScaler(1.0, rule)
    scaler.set_scale(scale)
    scaler.set_growth_tracker(growth_tracker)
    for overflow in overflows:
        plain = next_scale(state, rule, overflow=overflow)
        state = ScaleState(fp32(plain.scale), plain.growth_tracker)
        scaler.found_inf.fill_(overflow)
        scaler.update()
        assert (scaler.read_scale(), scaler.read_growth_tracker()) == state


@given(rules(), scales, st.integers(0, 4))
def test_the_scale_never_reaches_0(rule, scale, growth_tracker):
    state = ScaleState(scale, growth_tracker)
    for _ in range(40):
        state = next_scale(state, rule, overflow=True)
    assert fp32(state.scale) >= SMALLEST_SCALE
    assert math.isfinite(fp32(1.0 / fp32(state.scale)))
