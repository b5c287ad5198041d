"""The simple examples: one process, two processes, and the comparison of loss curves."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SIMPLE = Path(__file__).parents[2] / "examples" / "simple"


def load(name):
    spec = importlib.util.spec_from_file_location(f"simple_{name}", SIMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def curves():
    pytest.importorskip("sklearn", reason="the demo extra is not installed")
    return load("loss_curves")


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_the_net_fits_the_curve(level, capsys):
    first, last = load("main_amp").main(["--opt-level", level, "--steps", "60"])
    assert last < first / 3
    assert re.search(r"^step   59  loss 0\.\d{4}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_one_model(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(str(SIMPLE / "distributed" / "distributed_data_parallel.py"), "--opt-level", "O5"),
    ]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120
    )
    loss = re.search(r"^2 processes, loss (\S+)$", done.stdout, re.MULTILINE)
    assert float(loss[1]) < 0.01
    assert "largest difference between their weights: 0.0\n" in done.stdout


def test_fp32_is_at_no_distance_from_itself(curves):
    compared, spread = curves.compare(["fp32"], seeds=1, steps=2, device="cpu")
    assert compared["fp32"].apart == 0.0 < spread


@pytest.mark.parametrize(
    ("level", "peer"),
    [("O1", "torch.amp fp16"), ("O4", "torch.amp bf16"), ("O5", "torch.amp bf16")],
)
def test_a_level_is_closer_to_fp32_than_other_first_weights_are(curves, level, peer):
    compared, spread = curves.compare([level, peer], seeds=1, steps=12, device="cpu")
    assert 0.0 < compared[level].apart < spread / 4
    assert 0.0 < compared[peer].apart < spread / 4


@pytest.mark.parametrize(
    ("level", "way"),
    [
        ("O1", "torch.amp fp16"),
        ("O2", "torch.amp fp16"),
        ("O4", "torch.amp bf16"),
        ("O5", "torch.amp bf16"),
    ],
)
def test_on_this_net_a_level_has_the_curve_of_torch_amp(curves, level, way):
    run = {"seed": 0, "order": 0, "steps": 12, "device": "cpu"}
    assert curves.losses(level, **run) == curves.losses(way, **run)


@pytest.mark.parametrize("way", ["torch.amp fp16", "torch.amp bf16", "O3"])
def test_every_way_of_training_lowers_the_loss(curves, way):
    losses = curves.losses(way, seed=0, order=0, steps=12, device="cpu")
    assert losses[-1] < losses[0] / 2


def test_the_end_of_a_curve_is_its_last_tenth(curves):
    assert curves.final([9.0] * 18 + [1.0, 3.0]) == 2.0
    assert curves.final([9.0, 1.0]) == 1.0


def test_the_table_has_a_row_for_each_way(curves, capsys):
    curves.main(["--steps", "2", "--seeds", "1", "--ways", "fp32", "O4"])
    rows = re.findall(r"^\| (\S+) \| (\d\.\d{4}) \| (\d\.\d{4}) \|$", capsys.readouterr().out, re.M)
    assert [way for way, *_ in rows] == ["fp32", "O4"]
    assert all(math.isfinite(float(number)) for _, *numbers in rows for number in numbers)
