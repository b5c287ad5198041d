"""The simple examples: one process, two processes, and the comparison of loss curves."""

import math
import re

import pytest
import torch

from tests.package.examples.conftest import EXAMPLES
from tests.support.ranks import run_script


@pytest.fixture
def curves(load):
    return load("simple/loss_curves", "sklearn")


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_the_net_fits_the_curve(load, level, capsys):
    first, last = load("simple/main_amp").main(["--opt-level", level, "--steps", "60"])
    assert last < first / 3
    assert re.search(r"^step   59  loss 0\.\d{4}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_one_model(on_two_ranks):
    script = EXAMPLES / "simple/distributed/distributed_data_parallel.py"
    printed = run_script(on_two_ranks, script, "--opt-level", "O5")
    loss = re.search(r"^2 processes, loss (\S+)$", printed, re.MULTILINE)
    assert float(loss[1]) < 0.01
    assert "largest difference between their weights: 0.0\n" in printed


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_on_this_net_a_level_has_the_curve_of_torch_amp(curves, level):
    way = "torch.amp fp16" if level in ("O1", "O2") else "torch.amp bf16"
    run = {"seed": 0, "order": 0, "steps": 12, "device": "cpu"}
    assert curves.losses(level, **run) == curves.losses(way, **run)


def test_the_table_has_a_row_for_each_way(curves, capsys):
    curves.main(["--steps", "2", "--seeds", "1", "--ways", "fp32", "O4"])
    rows = re.findall(r"^\| (\S+) \| (\d\.\d{4}) \| (\d\.\d{4}) \|$", capsys.readouterr().out, re.M)
    assert [way for way, *_ in rows] == ["fp32", "O4"]
    assert all(math.isfinite(float(number)) for _, *numbers in rows for number in numbers)
