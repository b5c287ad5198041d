"""A run that goes on from its state dicts in a new process is the run that never stopped."""

import pathlib
import subprocess
import sys

import pytest
import torch

from tests.checkpoint import runs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every run cut in two, its second half done here and, in all ways, in another process."""
    folder = tmp_path_factory.mktemp("runs")
    for config in runs.CONFIGS:
        _, name, losses = config
        pair = runs.first_half(*config)
        torch.save(runs.states(*pair), runs.file_of(folder, "saved", *config))
        runs.second_half(*pair, name, losses)
        torch.save(runs.everything(*pair), runs.file_of(folder, "expected", *config))
        del pair
    command = [sys.executable, "-m", "tests.checkpoint.runs", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("name", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_one_bit_for_bit(
    folder, level, name, losses
):
    assert runs.file_of(folder, "wrong", level, name, losses).read_text() == ""


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_runs_are_finite_and_their_scales_move_after_a_count_and_an_overflow(level, losses):
    """What makes the test above worth its name."""
    pair = runs.first_half(level, "SGD", losses)
    saved = runs.amp.state_dict().values()
    runs.second_half(*pair, "SGD", losses)
    found = runs.amp.state_dict().values()
    assert all(weight.isfinite().all() for weight in pair[0].parameters())
    if losses == 2 or level in ("O1", "O2"):
        assert max(entry["unskipped"] for entry in saved) > 0
        assert [e["loss_scale"] for e in saved] != [e["loss_scale"] for e in found]
        assert len({entry["loss_scale"] for entry in saved}) == losses
