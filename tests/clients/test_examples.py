"""The examples of other libraries, run as their READMEs say, on a few images."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.clients, pytest.mark.slow]


# PyPI's torchvision does not import on a CPU torch without help.
RUN = """
import os, runpy, shlex, sys
_, sys.path[0], script, *lines = sys.argv
from tests.clients.libraries import declare_torchvision_operators
declare_torchvision_operators()
sys.path[0] = os.path.dirname(script)
for line in lines:
    sys.argv = [script, *shlex.split(line), "--work-dir", "runs"]
    print("== run", flush=True)
    runpy.run_path(script, run_name="__main__")
"""


def run(script, folder, *lines):
    """Runs the example in one process with each line of arguments; returns what each run prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT), str(EXAMPLES / script), *lines],
        check=True, stdout=subprocess.PIPE, text=True, cwd=folder, timeout=240,
    )  # fmt: skip
    return done.stdout.split("== run\n")[1:]


def need_installed(*names):
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_mmengine_trains_and_resumes(tmp_path):
    need_installed("mmengine", "sklearn")
    options = (
        "--cfg-options train_dataloader.dataset.limit=96 val_dataloader.dataset.limit=32 "
        "optim_wrapper.opt_level=O5 train_cfg.max_epochs="
    )
    _, text = run("mmengine/train.py", tmp_path, f"{options}2", f"--resume {options}3")
    saved = {path.name for path in (tmp_path / "runs").glob("*.pth")}
    assert saved == {"epoch_2.pth", "epoch_3.pth"}
    assert "resumed epoch: 2, iter: 4" in text
    assert re.findall(r"\(val\) \[(\d)\].*accuracy: 0\.\d+", text) == ["3"]


@pytest.mark.parametrize(
    ("library", "saved"), [("ignite", "checkpoint_4.pt"), ("lightning", "epoch_1.ckpt")]
)
def test_an_example_trains_and_resumes(tmp_path, library, saved):
    need_installed(library, "sklearn")
    few = "--limit 96 --opt-level O5 --accumulate 2 --epochs"
    lines = f"{few} 2", f"{few} 3 --resume runs/{saved}"
    first, resumed = run(f"{library}/train.py", tmp_path, *lines)
    assert re.findall(r"epoch (\d): test loss \d", first) == ["1", "2"]
    assert re.findall(r"epoch (\d): test loss \d", resumed) == ["3"]


def test_the_trainer_reports_the_fault_beside_its_checkpoints(tmp_path):
    need_installed("transformers", "accelerate")
    healthy, text = run("transformers/train.py", tmp_path, "--steps 3", "--steps 3 --fault")
    assert "loss" in healthy
    assert "The report is in" not in healthy
    assert "Step 1: the loss is not finite." in text
    assert "aten.log in model.layers.1.mlp.act_fn, forward" in text
    assert (tmp_path / "runs" / "overflow-step-1.txt").read_text() in text
