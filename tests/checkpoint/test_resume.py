"""A run that goes on from its state dicts in a new process is the run that never stopped."""

import pathlib
import subprocess
import sys

import pytest
import torch

from tests.checkpoint import runs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_runs_resumed_in_a_new_process_are_the_uninterrupted_ones_bit_for_bit(tmp_path):
    for level, name in runs.CONFIGS:
        pair = runs.first_half(level, name)
        states = [part.state_dict() for part in (*pair, runs.amp)]
        torch.save(states, runs.file_of(tmp_path, "saved", level, name))
        expected = runs.second_half(*pair, name)
        torch.save(expected, runs.file_of(tmp_path, "expected", level, name))
        # What makes the comparison worth its name:
        assert all(weight.isfinite().all() for weight in expected["weights"])
        both = (states[2].values(), runs.amp.state_dict().values())
        saved, last = ([entry["loss_scale"] for entry in each] for each in both)
        assert saved != last
        assert len(set(saved)) == 2
        del pair
    command = [sys.executable, "-m", "tests.checkpoint.runs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    for config in runs.CONFIGS:
        assert runs.file_of(tmp_path, "wrong", *config).read_text() == ""
