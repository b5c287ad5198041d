"""The digits example: its curves, its record of a run, and its page."""

import json
import math
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    """The example's files import one another by name, as they do when Python runs them."""
    pytest.importorskip("sklearn", reason="the demo extra is not installed")
    monkeypatch.syspath_prepend(str(DIGITS))


@pytest.fixture
def few_digits():
    from train import load_data

    (images, labels), (test_images, test_labels) = load_data("cpu")
    return (images[:16], labels[:16]), (test_images[:8], test_labels[:8])


@pytest.fixture
def train_level(few_digits):
    import levels

    def train(level, *, seed=0, steps=3):
        return levels.train_level(
            level, few_digits, steps=steps, seed=seed, emulated=False, on_step=lambda: None
        )

    return train


@pytest.fixture
def make_run():
    from levels import Run

    def make(level="O0", **changes):
        values = {
            "compute_dtype": torch.float32,
            "emulated": False,
            "losses": (2.0, 1.0, 0.5),
            "loss_scales": (1.0, 1.0, 1.0, 1.0),
            "accuracy": 0.5,
            "bytes_per_param": 12.0,
        }
        return Run(level, **(values | changes))

    return make


@pytest.fixture
def page(tmp_path):
    from report import write_report

    def write(*runs, name="report.html"):
        path = tmp_path / name
        write_report(path, runs, {run.level: 10.0 for run in runs}, machine="a <machine>")
        return path.read_text()

    return write


# -- data ------------------------------------------------------------------------------------


def test_the_split_shares_no_digit():
    from sklearn.datasets import load_digits
    from train import load_data

    (train, train_labels), (test, test_labels) = load_data("cpu")
    assert (len(train), len(test)) == (len(train_labels), len(test_labels)) == (1437, 360)
    both = torch.cat([train, test]).mul(16).flatten(1).long()
    every = torch.tensor(load_digits().data).long()
    assert sorted(both.tolist()) == sorted(every.tolist())


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_batches_are_as_many_as_asked_for(steps):
    from train import batches

    data = (torch.arange(10.0), torch.arange(10))
    assert len(list(batches(data, steps=steps, batch_size=4, seed=0))) == steps


def test_an_epoch_holds_each_example_once():
    from train import batches

    data = (torch.arange(10.0), torch.arange(10))
    epoch = islice(batches(data, steps=9, batch_size=4, seed=0), 3)
    assert sorted(torch.cat([labels for _, labels in epoch]).tolist()) == list(range(10))


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_the_same_seed_gives_the_same_curve(train_level, level):
    assert train_level(level, seed=3).losses == train_level(level, seed=3).losses


def test_another_seed_gives_another_curve(train_level):
    assert train_level("O0", seed=3).losses != train_level("O0", seed=4).losses


@pytest.mark.parametrize(("level", "expected"), [("O0", 12), ("O4", 12), ("O5", 14)])
def test_bytes_per_param_are_those_of_the_level(train_level, level, expected):
    # O5 keeps batch norm in fp32, 12 bytes for each of its few parameters.
    assert train_level(level, steps=1).bytes_per_param == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", torch.float32), ("O4", torch.bfloat16), ("O5", torch.bfloat16)]
)
def test_the_compute_dtype_is_the_one_seen(train_level, level, dtype):
    assert train_level(level, steps=1).compute_dtype is dtype


def test_training_lowers_the_loss(train_level):
    losses = train_level("O4", steps=8).losses
    assert losses[-1] < losses[0] / 2


def test_a_step_where_the_scale_falls_counts_as_skipped(make_run):
    assert make_run(loss_scales=(8.0, 4.0, 4.0, 8.0, 2.0)).skipped == (1, 4)


def test_one_level_runs_from_the_command_line():
    command = [sys.executable, str(DIGITS / "train.py"), "--opt-level", "O4", "--steps", "2"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    last = output.splitlines()[-1]
    assert re.fullmatch(r"final loss \d\.\d{4}, test accuracy \d+\.\d\d%", last)


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_count_below_one_is_refused(value):
    import argparse

    from train import count

    with pytest.raises(argparse.ArgumentTypeError, match=f"{value} is not a number of at least 1"):
        count(value)


def test_the_comparison_prints_a_row_per_level_and_writes_the_page(monkeypatch, capsys, tmp_path):
    import compare

    path = tmp_path / "out.html"
    options = ["--levels", "O0", "O4", "--epochs", "1", "--rounds", "1", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *options])
    compare.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["O0"], ["O4"])] == [
        ["O0", "fp32"],
        ["O4", "bf16"],
    ]
    assert path.read_text().count("<tr") == 3


# -- table and page --------------------------------------------------------------------------


def test_speed_is_the_time_of_o0_by_the_level_s(make_run):
    from table import rows

    runs = [make_run("O0"), make_run("O4")]
    assert [row.speed for row in rows(runs, {"O0": 30.0, "O4": 15.0})] == ["1.00x", "2.00x"]


def test_an_emulated_level_is_marked_and_explained(make_run):
    from table import text_table

    text = text_table([make_run("O1", compute_dtype=torch.float16, emulated=True)], {"O1": 1.0})
    assert "fp16 *" in text
    assert "Trained for 3 steps only" in text


def test_the_table_s_columns_are_aligned(make_run):
    from table import text_table

    lines = text_table([make_run("O0"), make_run("O4")], {"O0": 1234.5, "O4": 1.0}).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_the_page_asks_the_network_for_nothing(make_run, page):
    text = page(make_run("O0"), make_run("O4"))
    assert not re.findall(r"https?:|<link|src=|@import|url\(|fetch\(", text)


def test_the_same_runs_give_the_same_page(make_run, page):
    runs = make_run("O0"), make_run("O4")
    assert page(*runs, name="a.html") == page(*runs, name="b.html")


def test_the_page_escapes_the_machine_s_name(make_run, page):
    assert "a &lt;machine&gt;" in page(make_run())


def test_each_skipped_step_gets_a_cross(make_run, page):
    run = make_run("O1", loss_scales=(4.0, 2.0, 2.0, 1.0))
    wide_and_narrow = 2
    assert page(run).count('class="mark O1"') == 2 * wide_and_narrow


def test_a_static_scale_of_one_has_no_chart(make_run, page):
    assert "<h2>Loss scale</h2>" not in page(make_run("O4"))


def test_a_loss_that_is_not_finite_ends_its_curve(make_run, page):
    text = page(make_run("O3", losses=(2.0, math.nan, 1.0)))
    assert "diverged" not in text  # the last loss is finite again
    (data,) = re.findall(r"data-values='(.*?)'", text)
    assert json.loads(data) == {"O3": [2, None, 1]}
    assert not re.findall(r"\bnan\b", text, re.IGNORECASE)


def test_a_run_that_ends_without_a_finite_loss_is_called_diverged(make_run, page):
    assert "diverged" in page(make_run("O3", losses=(2.0, 1.0, math.inf)))


# -- charts ----------------------------------------------------------------------------------


def test_smoothing_leaves_a_constant_as_it_is():
    from charts import smooth

    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)


@pytest.mark.parametrize(("first", "last"), [(0, 10), (1, 138), (0, 5), (1, 1), (0, 20_000)])
def test_step_ticks_are_few_and_inside(first, last):
    from charts import step_ticks

    ticks = step_ticks(first, last, most=5)
    assert len(ticks) <= 5
    assert all(first <= tick <= last for tick in ticks)


def test_value_ticks_are_decades_on_a_long_axis_and_finer_on_a_short_one():
    from charts import value_ticks

    assert value_ticks(0.0015, 3.0, base=10) == pytest.approx([0.01, 0.1, 1.0])
    assert value_ticks(0.3, 3.0, base=10) == pytest.approx([0.5, 1.0, 2.0])


def test_loss_scale_ticks_are_powers_of_two():
    from charts import value_ticks

    assert value_ticks(2.0**13, 2.0**16, base=2) == [2.0**13, 2.0**14, 2.0**15, 2.0**16]
