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
import os, runpy, sys
del sys.argv[0]
sys.path[0] = sys.argv.pop(0)
from tests.clients.libraries import declare_torchvision_operators
declare_torchvision_operators()
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(script, folder, *arguments):
    """Returns what the example prints; MMEngine logs to stdout too."""
    command = [sys.executable, "-c", RUN, str(ROOT), str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        [*command, "--work-dir", "runs"],
        check=True, stdout=subprocess.PIPE, text=True, cwd=folder, timeout=120,
    )  # fmt: skip
    return done.stdout


def need_installed(*names):
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_mmengine_trains_and_resumes(tmp_path):
    need_installed("mmengine", "sklearn")
    few = ["train_dataloader.dataset.limit=96", "val_dataloader.dataset.limit=32"]
    level = "optim_wrapper.opt_level=O5"
    run("mmengine/train.py", tmp_path, "--cfg-options", *few, level, "train_cfg.max_epochs=2")
    assert {path.name for path in (tmp_path / "runs").glob("*.pth")} == {
        "epoch_1.pth",
        "epoch_2.pth",
    }
    text = run(
        "mmengine/train.py", tmp_path, "--resume", "--cfg-options", *few, level,
        "train_cfg.max_epochs=3",
    )  # fmt: skip
    assert "resumed epoch: 2, iter: 4" in text
    assert re.findall(r"\(val\) \[(\d)\].*accuracy: 0\.\d+", text) == ["3"]


@pytest.mark.parametrize(
    ("library", "saved"), [("ignite", "checkpoint_4.pt"), ("lightning", "epoch_1.ckpt")]
)
def test_an_example_trains_and_resumes(tmp_path, library, saved):
    need_installed(library, "sklearn")
    script, few = f"{library}/train.py", ["--limit", "96", "--opt-level", "O5", "--accumulate", "2"]
    text = run(script, tmp_path, *few, "--epochs", "2")
    assert re.findall(r"epoch (\d): test loss \d", text) == ["1", "2"]
    text = run(script, tmp_path, *few, "--epochs", "3", "--resume", f"runs/{saved}")
    assert re.findall(r"epoch (\d): test loss \d", text) == ["3"]


def test_the_trainer_reports_the_fault_beside_its_checkpoints(tmp_path):
    need_installed("transformers", "accelerate")
    text = run("transformers/train.py", tmp_path, "--steps", "3")
    assert "loss" in text
    assert not [*tmp_path.glob("runs/overflow*")]
    text = run("transformers/train.py", tmp_path, "--steps", "3", "--fault")
    assert "Step 1: the loss is not finite." in text
    assert "aten.log in model.layers.1.mlp.act_fn, forward" in text
    assert (tmp_path / "runs" / "overflow-step-1.txt").read_text() in text
