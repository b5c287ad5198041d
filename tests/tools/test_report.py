"""The report and the table: every figure, no network, nothing unescaped."""

import itertools
import json
import math
import re
from dataclasses import replace
from html import unescape

import pytest

from apex.tools.report import report
from apex.tools.report.lines import smooth, spread_out
from apex.tools.report.scales import round_ticks, tick_label, value_range, value_ticks
from apex.tools.results import ModuleError, Stored
from apex.tools.text import comparison_text, text_table
from apex.tools.variants import VARIANTS
from tests.tools.cases import comparison_of, result_of

MINUS = "\N{MINUS SIGN}"


def page(*results, **changes):
    return report(comparison_of(*results, **changes))


def charts(text):
    found = re.findall(r'data-chart="(.*?)"', text)
    return [json.loads(unescape(data)) for data in found]


# -- page ------------------------------------------------------------------------------------


def test_the_page_asks_the_network_for_nothing():
    text = page(*(result_of(name) for name in VARIANTS))
    assert not re.findall(r"https?:|<link|src=|@import|url\(|fetch\(", text)


def test_the_page_has_one_row_for_each_level():
    figures = page(*(result_of(name) for name in VARIANTS)).partition("All figures")[2]
    assert figures.count("<tr") == 1 + len(VARIANTS)


def verdicts(text):
    """Returns levels, word and reason of each row of the first table."""
    table = re.search('<table class="verdicts">.*?</table>', text, re.DOTALL)[0]
    return [
        (re.findall(r'chip (\S+)"', row), *re.findall(r'class="word (\w+)".*<td>(.*)</td>', row)[0])
        for row in re.findall('<tr><th scope="row">.*?</tr>', table)
    ]


def test_the_verdicts_stand_under_the_headline_and_levels_ruled_out_alike_share_a_row():
    skipped = {"emulated": True, "training": None, "timing": None, "probe": None, "skipped": True}
    text = page(
        result_of(samples=[10.0] * 20),
        *(replace(result_of(name), **skipped) for name in ("O1", "O2")),
        result_of("O4", samples=[5.0] * 20),
        result_of("O5", samples=[5.0] * 20),
        result_of("bf16", losses=(9.0,) * 10, samples=[5.0] * 20),
    )
    assert text.index("</h1>") < text.index('class="verdicts"') < text.index("<figure")
    speed = "2.00x as fast as fp32 (2.00 to 2.00x)"
    assert verdicts(text) == [
        (["O0"], "baseline", "what the others are measured against"),
        (
            ["O1", "O2"],
            "skipped",
            "fp16 is emulated on this machine; --emulated trains it for a few steps",
        ),
        (["O4"], "use", speed),
        (["O5"], "ties", speed),
        (["bf16"], "no", "final loss 9, against 0.1056 in fp32"),
    ]


def test_the_page_prints_as_three_sheets():
    text = page(*(result_of(name) for name in VARIANTS))
    assert re.findall('<div class="(sheet.*?)">', text) == ["sheet", "sheet curves", "sheet all"]
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    assert ".sheet + .sheet { break-before: page }" in style
    assert not re.findall(r"@media \((?:prefers|max)", style)  # paper is no dark or narrow screen


def test_the_same_comparison_gives_the_same_page():
    assert page(result_of(), result_of("O4")) == page(result_of(), result_of("O4"))


def test_what_comes_from_outside_is_escaped():
    text = page(result_of(errors=("a <b> error",)), target="<i>.py", notes=("a <note>",))
    assert "a &lt;machine&gt;" in text
    assert not re.findall("<b> error|<i>.py|<note>", text)


def test_names_of_modules_are_escaped():
    modules = (ModuleError("<script>", "A<b>", 0.5), ModuleError("", "Sequential", 0.5))
    text = page(result_of(), result_of("O4", probe={"modules": modules}))
    assert text.count("<script>") == 1  # the page's own
    assert "&lt;script&gt; A&lt;b&gt;" in text
    assert charts(text)[2]["steps"][0] == "<script> A<b>"


@pytest.mark.parametrize("package", ["apex.tools.report", "apex.debug.rendering"])
def test_the_installed_package_holds_its_templates_and_styles(package):
    from importlib import resources

    folder = resources.files(package) / "page"
    suffixes = {each.name.partition(".")[2] for each in folder.iterdir()}
    assert {"html.jinja", "css"} <= suffixes


def test_torch_brings_jinja2():
    from importlib.metadata import requires

    assert any(re.match(r"jinja2\b(?!.*;)", each) for each in requires("torch"))


def test_every_level_s_colour_is_in_the_style_for_light_and_dark():
    style = re.search("<style>(.*?)</style>", page(result_of()), re.DOTALL)[1]
    for name in VARIANTS:
        assert len(re.findall(rf"--{name}: #[0-9a-f]{{6}}", style)) == 2
        assert re.search(rf"\.{name}(, \.[\w-]+)* {{ --level: var\(--{name}\) }}", style)


# Machado et al., IEEE TVCG 2009: what a person without green cones sees, in linear RGB.
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
FAMILIES = {
    "fp16": ("O1", "O2", "O3", "autocast-fp16"),
    "bf16": ("O4", "O5", "autocast-bf16", "bf16"),
}


def yellow_to_blue(colour):
    """Returns b* of CIELAB of a colour as seen without green cones: positive is yellow."""
    codes = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in codes]
    red, green, blue = (
        min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0.0), 1.0)
        for row in DEUTERANOPIA
    )
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0888
    return 200 * (y ** (1 / 3) - z ** (1 / 3))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_families_of_levels_differ_in_colour_without_green_cones_too(scheme):
    style = re.search("<style>(.*?)</style>", page(result_of()), re.DOTALL)[1]

    def seen(name):
        return yellow_to_blue(re.findall(rf"--{name}: (#[0-9a-f]{{6}})", style)[scheme])

    assert min(seen(name) for name in FAMILIES["fp16"]) > 15
    assert max(seen(name) for name in FAMILIES["bf16"]) < -15
    assert abs(seen("O0")) < 10


def test_torch_s_own_variants_are_dashed_and_no_others():
    style = re.search("<style>(.*?)</style>", page(result_of()), re.DOTALL)[1]
    (dashed,) = re.findall(r"(\.line\..*) { stroke-dasharray", style)
    torch_s = [name for name, variant in VARIANTS.items() if variant.engine == "autocast"]
    assert dashed == ", ".join(f".line.{name}" for name in torch_s)


def figure(text, title):
    return re.search(rf"<figure[^>]*><figcaption><h2>{title}</h2>.*?</figure>", text, re.DOTALL)[0]


def test_the_loss_is_drawn_as_its_difference_from_fp32_with_fp32_s_noise():
    base = tuple(2.0 + 0.1 * (-1) ** step for step in range(40))
    level = tuple(1.1 * value for value in base)
    text = page(result_of(losses=base), result_of("O4", losses=level))
    (values,) = charts(text)[0]["values"].values()
    assert values == pytest.approx([10.0] * 40, rel=1e-2)  # percent
    drawn = figure(text, "Loss, difference from fp32")
    assert drawn.count('class="band"') == 2  # wide and narrow
    assert "in percent of it" in drawn
    assert '"O0"' not in drawn


def test_a_loss_that_may_be_negative_differs_absolutely():
    base, level = (-1.0,) * 10, (-0.75,) * 10
    text = page(result_of(losses=base), result_of("O4", losses=level))
    assert charts(text)[0]["values"] == {"O4": [0.25] * 10}
    assert "in percent" not in figure(text, "Loss, difference from fp32")


def test_without_another_level_there_is_no_difference_to_draw():
    assert "difference from fp32</h2>" not in page(result_of())


def test_a_level_that_diverges_does_not_flatten_the_others():
    base = tuple(2.0 + 0.1 * (-1) ** step for step in range(40))
    good, bad = tuple(1.1 * value for value in base), tuple(1e6 * value for value in base)
    text = page(result_of(losses=base), result_of("O4", losses=good), result_of("O5", losses=bad))
    ticks = re.findall(
        r'class="tick y"[^>]*>([+\u2212]?[\d.]+) %<', figure(text, "Loss, difference from fp32")
    )
    assert max(abs(float(tick.replace(MINUS, "-"))) for tick in ticks) < 100


def test_each_line_is_labelled_at_its_end():
    levels = [result_of(name) for name in VARIANTS]
    drawn = figure(page(*levels), "Training loss")
    places = {
        level: float(y)
        for level, y in re.findall(r'class="end (\S+)" x="[\d.]+" y="([\d.]+)"', drawn)
    }
    assert set(places) == set(VARIANTS)
    ordered = sorted(places.values())
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 12


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([10.0, 50.0], [10.0, 50.0]),
        ([10.0, 12.0], [10.0, 20.0]),
        ([98.0, 99.0], [90.0, 100.0]),
        ([-5.0, 300.0], [0.0, 100.0]),
        ([], []),
    ],
)
def test_labels_move_apart_within_the_chart(places, expected):
    assert spread_out(places, 10.0, 0.0, 100.0) == expected


def peak_of(level, size, way="device"):
    return result_of(level, peak_bytes=size, peak_from=way)


def test_memory_is_the_peak_where_measured_and_bytes_per_parameter():
    text = page(peak_of("O0", 8_000_000), peak_of("O4", 6_000_000))
    assert "8.0 MB" in figure(text, "Peak memory")
    assert "during training" in figure(text, "Peak memory")
    counted = page(peak_of("O0", 8_000_000, "events"), peak_of("O4", 6_000_000, "events"))
    assert "one more iteration, by the allocator's events" in unescape(
        figure(counted, "Peak memory")
    )
    assert "saved for backward" not in figure(text, "Peak memory")
    assert "12.0 B" in figure(text, "Stored per parameter")
    assert "saved for backward" in figure(page(result_of()), "Memory of a step")


def test_each_skipped_step_gets_a_cross():
    scales = (4.0, 2.0, 2.0, 1.0, *(1.0,) * 7)
    wide_and_narrow = 2
    assert page(result_of(), result_of("O1", loss_scales=scales)).count('class="mark O1"') == (
        2 * wide_and_narrow
    )


def test_a_static_scale_of_one_has_no_chart():
    assert "<h2>Loss scale</h2>" not in page(result_of(), result_of("O4"))


def test_a_loss_that_is_not_finite_ends_its_curve():
    losses = (2.0, math.nan, *(1.0,) * 8)
    text = page(result_of(), result_of("O4", losses=losses))
    assert charts(text)[1]["values"]["O4"][:3] == [2, None, 1]
    assert not re.findall(r"\bnan\b", text, re.IGNORECASE)


def test_an_infinite_distance_of_a_module_breaks_no_chart():
    broken = (ModuleError("0", "Linear", math.inf), ModuleError("", "Sequential", 0.5))
    text = page(result_of(), result_of("O4", probe={"modules": broken}))
    assert "Infinity" not in text
    assert not re.findall(r'd="[^"]*(inf|nan)', text)


def test_emulated_levels_have_a_chart_of_their_own_and_a_bar_off_the_scale():
    text = page(result_of(), result_of("O1", emulated=True, milliseconds=500.0))
    assert '<i class="bar off"' in text
    assert list(charts(text)[0]["values"]) == ["O0"]


def test_a_comparison_in_which_all_failed_still_gives_a_page():
    broken = replace(result_of(), training=None, timing=None, probe=None, errors=("training: no",))
    text = page(broken)
    assert "No recommendation" in text
    assert "training: no" in text


# -- table -----------------------------------------------------------------------------------


def test_the_table_marks_and_explains_an_emulated_level():
    text = comparison_text(comparison_of(result_of(), result_of("O1", emulated=True)))
    assert "fp16 *" in text
    assert "Trained for only 10 steps" in " ".join(text.split())


def test_the_table_tells_speed_memory_skips_and_the_first_module():
    masters = Stored(params=100, model=200, masters=400, optimizer=800)
    scales = (4.0, 2.0, *(2.0,) * 9)
    found = comparison_of(
        result_of(samples=[30.0] * 20),
        result_of("O2", samples=[15.0] * 20, stored=masters, loss_scales=scales),
    )
    (row,) = [line.split() for line in text_table(found).splitlines() if line.startswith("O2")]
    assert row[:7] == ["O2", "fp16", "15", "2.00x", "5.4", "kB", "14.0"]
    assert row[-2:] == ["(model)", "use"]
    assert "1 of 10" in " ".join(row)


def test_a_level_that_failed_is_in_the_table_and_reported_below():
    broken = replace(result_of("O4"), training=None, timing=None, probe=None, errors=("no kernel",))
    text = comparison_text(comparison_of(result_of(), broken))
    assert re.search(r"^O4 +failed +- ", text, re.MULTILINE)
    assert "O4: no kernel" in text


def test_a_run_that_ends_without_a_finite_loss_is_called_diverged():
    assert "diverged" in text_table(comparison_of(result_of(losses=(2.0, math.inf))))


def test_columns_without_anything_to_show_are_left_out():
    heading = text_table(comparison_of(result_of())).splitlines()[0]
    assert "evaluate" not in heading
    assert "peak" not in heading


# -- charts ----------------------------------------------------------------------------------


def test_smoothing_leaves_a_constant_as_it_is():
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)


@pytest.mark.parametrize(("first", "last"), [(0, 10), (1, 138), (0, 5), (1, 1), (0, 20_000)])
def test_step_ticks_are_few_and_inside(first, last):
    ticks = round_ticks(first, last, most=5, least_gap=1.0)
    assert len(ticks) <= 5
    assert all(first <= tick <= last for tick in ticks)


def test_value_ticks_are_decades_on_a_long_axis_and_finer_on_a_short_one():
    assert value_ticks(0.0015, 3.0, "log10") == pytest.approx([0.01, 0.1, 1.0])
    assert value_ticks(0.3, 3.0, "log10") == pytest.approx([0.5, 1.0, 2.0])


@pytest.mark.parametrize(("low", "high"), [(0.65, 1.4), (2.1, 2.2), (10.0, 10.01), (2.5, 4.9)])
def test_an_axis_within_a_factor_of_two_still_has_round_ticks(low, high):
    ticks = value_ticks(low, high, "log10")
    assert 2 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)
    assert len({tick_label(tick, "log10") for tick in ticks}) == len(ticks)


def test_loss_scale_ticks_are_powers_of_two():
    assert value_ticks(2.0**13, 2.0**16, "log2") == [2.0**13, 2.0**14, 2.0**15, 2.0**16]


def test_differences_are_labelled_with_their_sign():
    assert value_range([0.1, -0.3], "relative") == pytest.approx((-0.33, 0.33))
    labels = [tick_label(value, "relative")[0] for value in value_ticks(-0.33, 0.33, "relative")]
    assert labels == [f"{MINUS}20 %", "0", "+20 %"]
    assert tick_label(-0.5, "difference")[0] == f"{MINUS}0.5"


def test_shares_begin_at_zero_and_end_at_a_round_value():
    assert value_range([0.0, 0.31], "share") == (0.0, 0.4)


@pytest.mark.parametrize(
    ("value", "axis", "label"),
    [
        (0.0005, "log10", "0.0005"),
        (2.0, "log10", "2"),
        (1e-7, "log10", "10<-7>"),
        (5e-7, "log10", "5·10<-7>"),
        (65536.0, "log2", "2<16>"),
        (0.25, "share", "25 %"),
    ],
)
def test_tick_labels(value, axis, label):
    text, power = tick_label(value, axis)
    assert (f"{text}<{power}>" if power else text) == label


def test_a_chart_of_one_step_can_be_drawn():
    drawn = figure(page(result_of(losses=(1.0,))), "Training loss")
    assert len(re.findall(r'<path class="line O0"[^>]* d="M[\d.]+ [\d.]+"/>', drawn)) == 2
