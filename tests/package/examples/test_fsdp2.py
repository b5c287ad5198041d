"""The FSDP2 example on two ranks: it learns, and resumes."""

import re

import pytest
import torch

from tests.package.examples.conftest import EXAMPLES
from tests.support.features import shards_on_cpu
from tests.support.ranks import run_script

pytestmark = [
    pytest.mark.distributed,
    shards_on_cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]


def test_a_resumed_run_learns_on(on_two_ranks, tmp_path):
    def run(*arguments):
        options = ["--batch", 16, "--output", tmp_path / "sorter", *arguments]
        printed = run_script(on_two_ranks, EXAMPLES / "fsdp2/main.py", *options)
        found = re.search(r"^2 ranks, step \d+: loss (\S+)\n(\S+)% of", printed, re.MULTILINE)
        return float(found[1]), float(found[2]) / 100

    first, _ = run("--steps", 10, "--opt-level", "O4")
    loss, placed = run("--steps", 20, "--resume")
    assert loss < min(first, 2.2)  # the logarithm of ten digits is 2.3
    assert placed > 0.15
