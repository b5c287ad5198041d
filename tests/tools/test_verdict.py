"""The recommendation: which level, and the figures that say so."""

import math
import random
import re
import time
from dataclasses import replace

import pytest
import torch

from apex.tools.compare import timing
from apex.tools.compare.timing import CONFIDENCE, Load, median_interval, speed_of
from tests.tools.cases import IDLE, SOUND_LOSSES, comparison_of, result_of

SLOW_LOSSES = tuple(2.0 / step for step in range(1, 26))


def advised(*results):
    return comparison_of(result_of("O0"), *results).recommendation


def words(recommendation):
    return {verdict.level: verdict.word for verdict in recommendation.verdicts}


def whys(recommendation):
    return {verdict.level: verdict.why for verdict in recommendation.verdicts}


def test_the_fastest_sound_level_is_advised():
    found = advised(result_of("O4", milliseconds=6.0), result_of("O5", milliseconds=5.0))
    assert found.level == "O5"
    said = r"Use O5 \(bf16 model, fp32 batch norm and masters\): 2\.0\dx as fast as fp32 "
    assert re.match(said + r"\(1\.9\d to ", found.text)
    assert found.text.endswith("within the noise of fp32.")
    assert words(found) == {"O0": "baseline", "O4": "usable", "O5": "use"}


def test_levels_that_train_as_well_as_fp32_are_named_and_those_that_do_not():
    emulated = replace(result_of("O1"), emulated="fp16 is emulated on this CPU")
    skipped = replace(result_of("O2"), skipped="it would take an hour")
    results = result_of("O0"), emulated, skipped, result_of("bf16", losses=SLOW_LOSSES)
    said = "Training is as good as in fp32 at O1. "
    said += "Training fails, is worse, or loses steps or updates, at bf16."
    for load in (IDLE, Load(8.0, 2)):
        found = comparison_of(*results, load=load).recommendation
        assert (found.quality, words(found)["O1"]) == (said, "usable")
    assert comparison_of(*results, steps=5).recommendation.quality == ""


def test_no_gain_means_stay_in_fp32_and_says_why():
    found = advised(result_of("O4", milliseconds=9.9))
    assert found.level == "O0"
    said = r"Stay in fp32: O4, the fastest usable level, is 1\.0\dx as fast as fp32 "
    assert re.match(said + r"\(\d\.\d\d to 1\.0\dx\)\.$", found.text)
    assert words(found) == {"O0": "use", "O4": "usable"}


def test_a_level_without_masters_is_never_advised():
    found = advised(result_of("bf16", milliseconds=5.0))
    assert (found.level, words(found)) == ("O0", {"O0": "use", "bf16": "no"})
    assert whys(found)["bf16"].endswith("; no fp32 masters, for comparison only")


# -- quiet, noisy, busy, tied ------------------------------------------------------------------


def planted(ratio, *, noisy, seed=0, rounds=20):
    """Returns fp32's times and those of a level ``ratio`` times as fast.

    With noise a step may take any time longer, whatever the level.
    """
    draw = random.Random(seed)

    def step(milliseconds):
        return milliseconds * (draw.lognormvariate(0.5, 1.0) if noisy else draw.uniform(0.98, 1.02))

    return [step(10.0) for _ in range(rounds)], [step(10.0 / ratio) for _ in range(rounds)]


def judged(ratio, *, load=IDLE, losses=SOUND_LOSSES, **planting):
    base, level = planted(ratio, **planting)
    results = result_of("O0", samples=base), result_of("O4", samples=level, losses=losses)
    return comparison_of(*results, load=load)


@pytest.mark.parametrize(("ratio", "level"), [(2.0, "O4"), (1.1, "O4"), (1.0, "O0"), (0.7, "O0")])
def test_a_quiet_machine_decides(ratio, level):
    for seed in range(20):
        assert judged(ratio, noisy=False, seed=seed).recommendation.level == level


def test_a_busy_machine_gives_no_verdict_on_speed_whatever_it_measured():
    load = Load(8.0, 2)
    found = judged(1.8, noisy=False, load=load).recommendation
    why = "this machine is busy (load 8 on 2 cores). Run again when it is idle."
    assert found.text == f"No verdict on speed: {why}"
    assert found.level is None
    assert words(found) == {"O0": "baseline", "O4": "unclear"}
    assert whys(found)["O4"] == "trains as well as fp32; not timed"
    assert judged(1.8, noisy=False, load=load, losses=SLOW_LOSSES).recommendation.level == "O0"


@pytest.mark.parametrize("load", [IDLE, Load(2.9, 2)])
def test_a_machine_is_not_busy_by_this_program_alone(load):
    assert judged(1.8, noisy=False, load=load).recommendation.level == "O4"


def test_times_that_vary_too_much_give_no_verdict():
    found = judged(1.8, noisy=True, seed=1).recommendation
    said = r"No verdict on speed: the times vary too much .*O4 looked \d\.\d\dx as fast as fp32 "
    assert re.match(said + r"\(0\.", found.text)
    assert found.text.endswith("Run again with more --rounds.")
    assert words(found) == {"O0": "baseline", "O4": "unclear"}
    assert judged(1.0, noisy=True, seed=1).recommendation.level is None  # it may be much faster
    base, level = planted(1.0, noisy=True, seed=1)
    smaller = result_of("O4", samples=level)
    assert comparison_of(result_of(samples=base, saved=10**9), smaller).recommendation.level is None
    wide = result_of("O4", samples=[8.0, 12.0] * 10)
    assert comparison_of(result_of(samples=[10.0] * 20), wide).recommendation.level is None


TOO_FEW = [
    (3, 25, "No verdict from 25 training steps and 3 timed ones per level. Run again with"),
    (20, 5, "No verdict from 5 training steps and 20 timed ones per level. Run again with"),
]


@pytest.mark.parametrize(("rounds", "steps", "said"), TOO_FEW)
def test_too_few_rounds_or_steps_give_no_verdict(rounds, steps, said):
    base = result_of("O0", samples=[10.0] * rounds, losses=(1.0,) * steps)
    fast = result_of("O4", samples=[5.0] * rounds, losses=(1.0,) * steps)
    found = comparison_of(base, fast, steps=steps).recommendation
    assert found.text.startswith(said)
    assert (found.level, words(found)["O4"]) == (None, "unclear")
    assert whys(found)["O4"].endswith("too few steps to judge its training") == (steps == 5)


TIES = [
    (("O4", "O5", "autocast-bf16"), "O5, autocast-bf16."),
    (("O1", "O4"), "O1."),
    (("O2", "O4", "autocast-fp16"), "O2, autocast-fp16."),
]


@pytest.mark.parametrize(("names", "ties"), TIES)
def test_ties_are_named_and_the_simplest_level_wins(names, ties):
    found = advised(*(result_of(name, milliseconds=5.0) for name in names))
    assert found.level == "O4"  # fp32 weights, and no loss scale
    assert f"fp32. Equally fast within the spread: {ties}" in found.text
    assert words(found) == {"O0": "baseline", **dict.fromkeys(names, "ties"), "O4": "use"}


# -- memory and soundness --------------------------------------------------------------------


SAVINGS = [
    (10**9, 2, 10.0, "O4", r"1\.\d\dx\), 50% less memory \(477 MiB\)"),
    (10**6, 2, 10.0, "O0", r"x\), 50% less memory"),
    (10**9, 1.05, 10.0, "O0", r"1\.\d\dx\)\.$"),
    (10**9, 2, 11.0, "O0", r"0\.\d\dx\), 50% less memory"),
]


@pytest.mark.parametrize(("size", "share", "milliseconds", "level", "said"), SAVINGS)
def test_much_less_memory_at_the_same_speed_is_a_gain(size, share, milliseconds, level, said):
    smaller = result_of("O4", saved=int(size / share), milliseconds=milliseconds)
    found = comparison_of(result_of("O0", saved=size), smaller).recommendation
    assert found.level == level
    assert re.search(said, found.text)


def test_an_fp32_loss_that_is_not_finite_is_told_first():
    base = result_of("O0", losses=(math.nan,) * 25)
    emulated = replace(result_of("O1"), emulated="fp16 is emulated on this CPU")
    found = comparison_of(base, emulated, result_of("O5")).recommendation
    assert (found.level, found.quality) == (None, "")
    assert words(found) == {"O0": "baseline", "O1": "unclear", "O5": "unclear"}
    assert all("as well as fp32" not in why for why in whys(found).values())
    assert found.text == (
        "No recommendation: the final loss is not finite in fp32 either. Run `apex trace` on your "
        "training script: it names the operator."
    )


UNSOUND = {
    "nan": ({"losses": (1.0,) * 24 + (math.nan,)}, "the final loss is not finite"),
    "loss": ({"losses": SLOW_LOSSES}, ": 100.0 % higher on the same batches (standard error "),
    "frozen": ({"frozen": 0.7}, "updates of up to 70% of the weights"),
    "skips": ({"loss_scales": tuple(2.0**-i for i in range(26))}, "25 of 25 steps were skipped"),
    "error": ({"errors": ("training failed: RuntimeError",)}, "training failed: RuntimeError"),
}


@pytest.mark.parametrize(("changes", "why"), UNSOUND.values(), ids=UNSOUND)
def test_a_level_that_is_fast_and_unsound_is_refused_with_the_reason(changes, why):
    found = advised(result_of("O4", milliseconds=1.0, **changes))
    assert found.level == "O0"
    assert words(found)["O4"] == "no"
    assert why in whys(found)["O4"]
    assert found.quality == "Training fails, is worse, or loses steps or updates, at O4."


# -- the interval ----------------------------------------------------------------------------


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    draw = random.Random(0)
    found = [median_interval([draw.lognormvariate(0, 1) for _ in range(20)]) for _ in range(2000)]
    share = sum(each.low <= 1 <= each.high for each in found) / len(found)
    assert CONFIDENCE <= share < 0.98
    six = median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    assert (six.median, six.low, six.high) == (3.5, 1.0, 6.0)
    eight = median_interval(range(8))
    assert (eight.low, eight.high) == (0, 7)
    assert speed_of([1.0] * 5, [1.0] * 5) is None


def test_a_load_that_slows_whole_rounds_cancels_between_pairs():
    loads = [random.Random(1).uniform(1, 10) for _ in range(20)]
    base, ours = ([cost * load for load in loads] for cost in (3, 2))
    found = speed_of(ours, base)
    assert found.median == found.low == found.high == 1.5


def test_a_busy_machine_computes_in_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for load, inside in ((Load(9.0, 1), 1), (IDLE, 2)):
        with timing.suited_threads(load):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_times_are_in_milliseconds():
    work = {"O0": lambda: time.sleep(0.002)}
    (times,) = timing.time_interleaved(work, range(2), torch.device("cpu")).values()
    assert 2.0 <= times[0] < 2000.0


@pytest.mark.parametrize("short", [False, True])
def test_levels_take_turns_after_one_step_each_that_is_not_counted(short, monkeypatch):
    monkeypatch.setattr(timing, "_SHORT", math.inf if short else 0.0)
    taken = []
    steps = {name: (lambda name=name: taken.append(name)) for name in ("O0", "O1", "O4")}
    found = timing.time_interleaved(steps, range(3), torch.device("cpu"))
    # A short step follows another of the same level.
    assert taken == [*steps, *(name for name in [*steps] * 2 for _ in range(1 + short))]
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(steps, 2)
