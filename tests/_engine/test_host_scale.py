"""The host's loss scale follows the one rule, and its attributes may be set at any time."""

import random

import pytest

from apex._core.scale import ScaleRule, ScaleState, next_scale
from apex._engine.host_scale import HostScale


@pytest.mark.parametrize("seed", range(5))
def test_it_moves_by_next_scale(seed):
    random.seed(seed)
    window = random.randint(1, 4)
    scale, state = HostScale(4.0, 2.0, window), ScaleState(4.0, 0)
    for _ in range(40):
        overflow = random.random() < 0.3
        scale.update_scale(overflow)
        state = next_scale(state, ScaleRule(2.0, 0.5, window, floor=1.0), overflow=overflow)
        assert ScaleState(scale.cur_scale, scale.clean_steps) == state


def test_a_static_scale_stays_and_counts_steps():
    scale = HostScale(4.0, dynamic=False)
    for _ in range(3):
        scale.update_scale(True)
    assert (scale.cur_scale, scale.clean_steps) == (4.0, 3)


def test_a_changed_attribute_holds_from_the_next_update_on():
    scale = HostScale(4.0, scale_window=100)
    scale.scale_window, scale.scale_factor = 1, 4.0
    scale.update_scale(False)
    assert scale.cur_scale == 16.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0,), "loss_scale"),
        ((1.0, 0.0), "growth_factor"),
        ((1.0, 1.0), "growth_factor"),
        ((1.0, 2.0, 0), "growth_interval"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        HostScale(*arguments)
