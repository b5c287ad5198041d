"""The benchmarks: their counters count right, their verdicts follow the printed figures."""

import json
import sys
import warnings

import pytest
import torch
from torch import nn

from benchmarks import memory
from benchmarks.__main__ import main
from benchmarks.counting import counted_syncs
from benchmarks.loops import Task, fused_adamw
from benchmarks.measurement import Goal, Measurement, table, verdict
from benchmarks.race import Times
from tests.support.loops import every


def small_model():
    return nn.Linear(64, 64)


def small_batch():
    return torch.randn(4, 64), torch.randint(0, 64, (4,))


READS = [lambda t: t.sum().item(), lambda t: t.nonzero(), lambda t: t[t > 0]]
READS += [lambda t: t.sum().tolist()]


@pytest.mark.parametrize("read", READS)
def test_each_read_by_the_host_counts_once(read):
    tensor = torch.ones(3)
    with counted_syncs() as counts:
        read(tensor)
    assert sum(counts.values()) == 1


def test_device_work_counts_nothing():
    tensor = torch.ones(3, requires_grad=True)
    with counted_syncs() as counts:
        (tensor * 2).sum().backward()
        torch.where(tensor.isfinite().all(), tensor, 0)
    assert not counts


@every(level=memory.BYTES, count=[memory.live_bytes, memory.allocated_bytes])
def test_amp_stores_what_the_level_needs_and_no_more(level, count):
    params = sum(param.numel() for param in small_model().parameters())
    # The batch and some scalars add 0.3 bytes; a hidden copy of anything would add 2 or more.
    task = Task(small_model, small_batch, fused_adamw)
    assert count(task, level) / params == pytest.approx(memory.BYTES[level], abs=1.0)


def test_ratios_are_taken_round_by_round():
    times = Times({"a": [2.0, 3.0], "b": [1.0, 6.0]})
    assert times.ratios("a", "b") == [2.0, 0.5]


def test_a_goal_is_judged_by_the_printed_digits():
    for relation, value, passed in (("<=", 1.004, True), ("<=", 1.006, False), (">=", 0.996, True)):
        figure = Measurement("speed", "case", value, "x", Goal(relation, 1.0), digits=2)
        assert figure.passed is passed


def test_the_table_shows_a_missed_goal():
    good = Measurement("speed", "good", 0.5, "x", Goal("<=", 1.0))
    bad = Measurement("speed", "bad", 1.5, "x", Goal("<=", 1.0))
    lines = table([good, bad]).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["pass", "FAIL"]
    assert verdict([good, bad]) == "1 of 2 goals met; missed: speed: bad."


def test_the_command_writes_the_figures_it_prints(tmp_path, monkeypatch, capsys):
    path = tmp_path / "figures.json"
    command = ["benchmarks", "--quick", "--only", "syncs", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    with warnings.catch_warnings():
        main()
    figures = json.loads(path.read_text())["figures"]
    printed = capsys.readouterr().out
    assert len(figures) > 3
    assert all(figure["case"] in printed for figure in figures)
    assert "FAIL" not in printed  # 0 syncs with fused optimizers, at most 1 with others
