"""The FSDP2 example on two ranks: it learns, and resumes bit-identically."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.features import shards_on_cpu

MAIN = Path(__file__).parents[3] / "examples" / "fsdp2" / "main.py"

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    shards_on_cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]


def run(folder, *arguments):
    """Returns the loss and the share of digits in their places that the example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(MAIN), "--batch", "16", *arguments],
        check=True, stdout=subprocess.PIPE, text=True, cwd=folder, timeout=180,
    )  # fmt: skip
    found = re.search(r"^2 ranks, step \d+: loss (\S+)\n(\S+)% of", done.stdout, re.MULTILINE)
    return float(found[1]), float(found[2]) / 100


def test_a_resumed_run_learns_on(tmp_path):
    first, _ = run(tmp_path, "--steps", "10", "--opt-level", "O4")
    loss, placed = run(tmp_path, "--steps", "20", "--resume")
    assert loss < min(first, 2.2)  # the logarithm of ten digits is 2.3
    assert placed > 0.15
