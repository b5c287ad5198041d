"""The FSDP2 example on two ranks: it learns, and resumes."""

import functools
import re

import pytest
import torch

from tests.package.examples.conftest import EXAMPLES
from tests.support.features import lets_models_go, shards_on_cpu
from tests.support.ranks import run_script

pytestmark = [
    pytest.mark.distributed,
    shards_on_cpu,
    lets_models_go,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]


def test_a_resumed_run_learns_on_also_on_another_number_of_ranks(on_two_ranks, on_ranks, tmp_path):
    def run(ranks, *arguments):
        options = ["--batch", 16, "--output", tmp_path / "sorter", *arguments]
        on_these = on_two_ranks if ranks == 2 else functools.partial(on_ranks, ranks)
        printed = run_script(on_these, EXAMPLES / "fsdp2/main.py", *options)
        found = re.search(rf"^{ranks} ranks, step \d+: loss (\S+)\n(\S+)% of", printed, re.M)
        return float(found[1]), float(found[2]) / 100

    first, _ = run(2, "--steps", 10, "--opt-level", "O4")
    loss, placed = run(2, "--steps", 20, "--resume")
    assert loss < min(first, 2.2)  # the logarithm of ten digits is 2.3
    assert placed > 0.15
    after_one_more, _ = run(1, "--steps", 21, "--resume")
    assert abs(after_one_more - loss) < 0.1
