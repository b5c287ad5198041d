"""The recommendation: which level, and the figures that say so."""

import math

import pytest

from apex.tools.results import Stored
from apex.tools.variants import VARIANTS, parse_variants
from tests.tools.cases import comparison_of, result_of

SLOW_LOSSES = tuple(2.0 / step for step in range(1, 11))


def advised(*results):
    return comparison_of(result_of("O0"), *results).recommendation


def test_the_fastest_sound_level_is_advised():
    found = advised(result_of("O4", milliseconds=6.0), result_of("O5", milliseconds=5.0))
    assert found.level == "O5"
    assert found.text.startswith("Use O5 (bf16 model, fp32 batch norm and masters): 2.00x as fast")


def test_of_equally_fast_levels_the_first_in_the_table_is_advised():
    found = advised(result_of("O4", milliseconds=5.1), result_of("autocast-bf16", milliseconds=5.0))
    assert found.level == "O4"


def test_no_gain_means_stay_in_fp32_and_says_why():
    found = advised(result_of("O4", milliseconds=9.9))
    assert found.level == "O0"
    assert found.text.startswith("Stay in fp32: the fastest usable level")
    assert "O4, runs at 1.01x the speed of fp32 (9.9 ms (9.8 to 10) a step" in found.text


def test_a_gain_within_the_spread_of_the_times_is_none():
    found = advised(result_of("O4", milliseconds=8.0, spread=3.0))
    assert found.level == "O0"


@pytest.mark.parametrize(("size", "level"), [(10**9, "O4"), (10**6, "O0")])
def test_much_less_memory_at_the_same_speed_is_a_gain(size, level):
    found = comparison_of(
        result_of("O0", probe={"activation_bytes": size}),
        result_of("O4", probe={"activation_bytes": size // 2}),
    ).recommendation
    assert found.level == level
    assert ("50% less memory, 1.00x as fast" in found.text) == (level == "O4")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"losses": (1.0,) * 9 + (math.nan,)}, "the final loss is not finite."),
        ({"losses": SLOW_LOSSES}, "final loss 0.2111, against 0.1056 in fp32."),
        ({"frozen": ((5, 0.1), (10, 0.7))}, "updates of up to 70% of the weights"),
        ({"loss_scales": tuple(2.0**-i for i in range(11))}, "10 of 10 steps were skipped."),
        ({"emulated": True}, "bf16 is emulated on this machine (30x the time of fp32)."),
        ({"errors": ("training failed: RuntimeError: no",)}, "training failed: RuntimeError: no"),
    ],
    ids=["nan", "loss", "frozen", "skips", "emulated", "error"],
)
def test_a_level_that_is_fast_and_unsound_is_refused_with_the_reason(changes, why):
    found = advised(result_of("O4", milliseconds=1.0, **changes))
    assert found.level == "O0"
    assert any(reason.startswith("O4: ") and why in reason for reason in found.reasons)


def test_what_fails_in_fp32_too_speaks_against_no_level():
    errors = ("evaluating failed: ValueError: no figure",)
    base = result_of("O0", errors=errors)
    fast = result_of("O4", milliseconds=5.0, errors=errors)
    assert comparison_of(base, fast).recommendation.level == "O4"
    worse = result_of("O4", milliseconds=5.0, errors=(*errors, "probing failed: OSError"))
    found = comparison_of(base, worse).recommendation
    assert (found.level, found.reasons) == ("O0", ("O4: probing failed: OSError.",))


def test_levels_that_are_refused_alike_share_a_line():
    reasons = advised(result_of("O1", emulated=True), result_of("O2", emulated=True)).reasons
    assert reasons == ("O1, O2: fp16 is emulated on this machine (30x the time of fp32).",)


def test_levels_that_are_there_to_compare_with_are_never_advised():
    found = advised(result_of("O3", milliseconds=1.0), result_of("bf16", milliseconds=1.0))
    assert found.level == "O0"


def test_where_no_level_is_sound_the_text_says_so():
    found = advised(result_of("O1", milliseconds=1.0, emulated=True))
    assert found.text.endswith("no other level trained successfully on this machine.")


def test_fp32_alone_gets_no_advice():
    assert advised().text == "Nothing to compare: only fp32 was trained."


def test_the_reasons_give_time_loss_and_memory():
    masters = Stored(params=100, model=200, masters=400, optimizer=800)
    reasons = advised(result_of("O5", milliseconds=5.0, stored=masters)).reasons
    assert [reason.partition(":")[0] for reason in reasons] == [
        "Time",
        "Final loss",
        "Stored",
        "Saved for backward",
    ]
    assert "14.0 bytes per parameter, against 12.0" in reasons[2]


def test_levels_come_in_the_table_s_order_with_the_baseline():
    assert [v.name for v in parse_variants("O5, O4")] == ["O0", "O4", "O5"]
    assert [v.name for v in parse_variants(",".join(VARIANTS))] == list(VARIANTS)


@pytest.mark.parametrize("names", ["O6", "O4,o5", ""])
def test_an_unknown_level_is_refused_with_the_choices(names):
    with pytest.raises(ValueError, match="choose from O0, O1"):
        parse_variants(names)
