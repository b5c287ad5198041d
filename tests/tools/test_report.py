"""The report and the table: every figure, no network, nothing unescaped, nothing invented."""

import math
import re

import pytest

from apex.tools.compare.charts import charts
from apex.tools.compare.report import report
from apex.tools.compare.results import LEVELS, Result
from apex.tools.compare.table import comparison_text, table_text, tables
from apex.tools.compare.timing import Load
from tests.tools.cases import comparison_of, result_of

EVERY = [result_of(name) for name in LEVELS]
NAN = (1.0,) + (math.nan,) * 24


def test_the_page_asks_the_network_for_nothing_and_runs_no_script():
    text = report(comparison_of(*EVERY))
    assert not re.findall(r"https?:|<link|<script|src=|@import|url\(", text)


def test_each_table_has_a_row_for_each_level_and_few_columns():
    rows = report(comparison_of(*EVERY)).split("<tr")[1:]
    widths = [len(re.findall(r"<t[hd][ >]", row)) for row in rows]
    assert widths[: len(LEVELS)] == [3] * len(LEVELS)  # verdicts
    tables = widths[len(LEVELS) :]  # no column that is empty
    assert tables == [7] * (1 + len(LEVELS)) + [5] * (1 + len(LEVELS))


def test_what_the_user_names_is_escaped():
    text = report(comparison_of(*EVERY, target="<i>.py", notes=("a < b",)))
    assert "&lt;i&gt;.py" in text
    assert "a &lt; b" in text
    assert "<machine>" not in text


def drawn(comparison, which):
    """Returns the points of a chart's lines and bands, by level."""
    text = report(comparison).split("<svg")[which]
    points = {}
    for part in ("line", "band"):
        for level, path in re.findall(rf'class="{part} ([\w-]+)" d="M([^"]*)"', text):
            numbers = list(map(float, path.rstrip("Z").split()))
            points[part, level] = list(zip(numbers[::2], numbers[1::2], strict=True))
    return points


def test_there_are_two_charts_of_every_level():
    found = comparison_of(*EVERY)
    loss, apart = charts(found)
    assert [*loss.curves] == [*LEVELS]
    assert [*apart.curves] == [*LEVELS][1:]
    assert apart.low < -4.0 < 4.0 < apart.high  # the grey area and around it
    text = report(found)
    assert text.count("<svg") == 2
    assert 3 <= text.count('class="grid"') / 2 <= 7
    ticks = re.findall(r'class="tick x" style="left:([\d.]+)%">([^<]*)', text)
    assert ticks[3:] == [("79.17", "20"), ("100.00", "25"), *ticks[:5]]
    assert text.count('class="line ') == text.count('class="band ') == 9 + 8


@pytest.mark.parametrize("losses", [NAN, (math.inf,) * 25, (1.0,)])
def test_without_values_there_is_no_chart_and_no_axis(losses):
    found = comparison_of(result_of(losses=losses), result_of("O4", losses=losses))
    assert charts(found) == []
    text = report(found)
    assert "<svg" not in text
    assert "Run `apex trace`" in text or math.isfinite(losses[-1])


@pytest.mark.parametrize("value", [0.0, 1.0, -1e17])
def test_a_loss_that_never_changes_is_drawn(value):
    (chart,) = charts(comparison_of(result_of(losses=(value,) * 25)))
    assert chart.low < value < chart.high


def test_a_curve_ends_where_its_values_do_and_stays_inside_its_chart():
    diverging = tuple(1.0 / step for step in range(1, 11)) + (1e9,) * 5 + (math.nan,) * 10
    found = comparison_of(result_of(), result_of("O4", losses=diverging))
    for which, count in ((1, 15), (2, 8)):  # the first eight steps are one difference
        points = drawn(found, which)
        assert len(points["line", "O4"]) == count
        assert len(points["band", "O4"]) == 2 * count
        inside = [0 <= x <= 100 and 0 <= y <= 100 for path in points.values() for x, y in path]
        assert all(inside)


def test_a_bar_is_as_long_as_its_value():
    text = report(comparison_of(result_of(), result_of("O4", milliseconds=5.0, saved=1400)))
    widths = re.findall(r'class="bar O4" style="width:([\d.]+)%', text)
    assert len(widths) == 4
    assert 49 < float(widths[0]) < 51
    assert float(widths[3]) == 35.0


# -- the table -------------------------------------------------------------------------------


def texts(comparison):
    return "\n".join(map(table_text, tables(comparison)))


def test_the_text_fits_a_terminal_and_tells_the_same_reason_once():
    text = comparison_text(comparison_of(*EVERY, load=Load(8.0, 2)))
    assert max(map(len, text.splitlines())) <= 100
    assert "O1, O2, O4, O5, autocast-fp16, autocast-bf16: unclear, trains as well as fp32" in text
    first = [line.split()[0] for line in texts(comparison_of(*EVERY)).splitlines()]
    assert [word for word in first if "---" not in word] == ["level", *LEVELS] * 2


def test_a_busy_machine_shows_no_speed_and_notes_stand_below():
    text = comparison_text(comparison_of(*EVERY, load=Load(8.0, 2), notes=("A note.",)))
    above, note, below = text.partition("\n\nA note.\n\n")
    assert not re.search(r"\d\.\d\dx", above)
    assert note
    assert "Training is as good as in fp32 at O1, O2" in below.replace("\n", " ")
    assert "O0:" not in below  # nothing is to be said of it


def test_skipped_levels_have_no_row():
    skipped = Result(LEVELS["O1"], skipped="fp16 is emulated on this CPU")
    text = texts(comparison_of(result_of(), skipped, result_of("O2")))
    assert "O2" in text
    assert "O1" not in text


CELLS = [
    ("loss", {"losses": NAN}, "   nan  "),
    ("loss", {"losses": (1.0,) * 20 + (0.125,) * 5}, " 0.125 "),
    ("frozen", {"frozen": 0.034}, "3.4 %"),
    ("apart", {"losses": tuple(1.1 / step for step in range(1, 26))}, "+10 ± 0.4"),
    ("skipped", {"loss_scales": (2.0, 1.0) * 13}, "13 of 25"),
    ("evaluate", {"evaluation": 0.75}, "0.75"),
]


@pytest.mark.parametrize(("column", "changes", "cell"), CELLS)
def test_figures_are_written_shortly(column, changes, cell):
    text = texts(comparison_of(result_of(), result_of("O4", **changes)))
    assert cell in text
