"""The report and the table: every figure, no network, nothing unescaped."""

import json
import math
import re
from html import unescape

import pytest

from apex.tools.report import report
from apex.tools.report.lines import Chart, Line, picture, smooth
from apex.tools.report.scales import step_ticks, tick_label, value_range, value_ticks
from apex.tools.results import ModuleError, Stored
from apex.tools.text import comparison_text, text_table
from apex.tools.variants import VARIANTS
from tests.tools.cases import comparison_of, result_of


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
    assert page(*(result_of(name) for name in VARIANTS)).count("<tr") == 1 + len(VARIANTS)


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
    assert charts(text)[1]["steps"][0] == "<script> A<b>"


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
        assert f".{name} {{ --level: var(--{name}) }}" in style


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
    assert charts(text)[0]["values"]["O4"][:3] == [2, None, 1]
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
    from dataclasses import replace

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
    from dataclasses import replace

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
    ticks = step_ticks(first, last, most=5)
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
    drawn = picture(Chart("one", (Line("O0", (1.0,)),)), width=360, height=200, kind="wide")
    assert [each.tag for each in drawn.elements].count("path") == 1
