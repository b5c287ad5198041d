"""Paired ratios: a shared load cancels, and the interval holds the median as often as it says."""

import math
import random
from statistics import median

import pytest

from apex.tools.load import Load, current_load, why_times_spread
from apex.tools.paired import (
    CONFIDENCE,
    LEAST_ROUNDS,
    Interval,
    independent_ratio,
    median_interval,
    paired_ratio,
)


@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18), (100, 40)]
)
def test_the_ends_are_the_order_statistics_of_the_sign_test(count, rank):
    values = list(range(1, count + 1))
    random.Random(count).shuffle(values)
    found = median_interval(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.median == median(values)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    draw = random.Random(0)
    found = [median_interval([draw.lognormvariate(0, 1) for _ in range(20)]) for _ in range(2000)]
    share = sum(each.low <= 1 <= each.high for each in found) / len(found)
    assert CONFIDENCE <= share < 0.98


@pytest.mark.parametrize("count", range(1, LEAST_ROUNDS))
def test_few_values_give_no_interval(count):
    found = median_interval([2.0] * count)
    assert (found.median, found.low, found.high) == (2.0, 0.0, math.inf)
    assert not found.known
    assert str(found) == "2.00x as fast as fp32"


def test_without_values_there_is_no_ratio():
    with pytest.raises(ValueError, match="at least one value"):
        paired_ratio([1.0], [])


def test_a_load_that_slows_whole_rounds_cancels():
    loads = [random.Random(1).uniform(1, 10) for _ in range(20)]
    found = paired_ratio([3 * load for load in loads], [2 * load for load in loads])
    assert found.median == found.low == found.high == 1.5
    apart = independent_ratio([3 * load for load in loads], [2 * load for load in loads])
    assert apart.low <= found.low <= found.high <= apart.high


def test_rounds_that_only_one_has_do_not_count():
    assert paired_ratio([4.0, 9.0, 9.0], [2.0]).median == 2.0


def test_a_few_stalls_leave_the_interval_as_it_is():
    quiet, stalled = [1.0] * 20, [1.0] * 17 + [50.0] * 3
    assert paired_ratio(stalled, quiet) == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (Load(17.2, 2), "this machine is busy (load 17 on 2 cores)"),
        (Load(1.04, 1), "the times vary too much (load 1 on 1 core)"),
        (None, "the times vary too much"),
    ],
)
def test_the_reason_names_the_load(load, text):
    assert why_times_spread(load) == text


def test_this_machine_has_cores():
    load = current_load()
    assert load is None or (load.cores >= 1 and load.average >= 0)
