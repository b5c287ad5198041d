"""glibc's malloc keeps what a step frees, once a model on the CPU was prepared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# A fresh process each: the limits are those of the process.
STEPS = """
import resource, sys
import torch
from apex import amp

if sys.argv[1] != "none":
    amp.initialize(torch.nn.Linear(2, 2), opt_level=sys.argv[1], verbosity=0)

def step():
    kept = [torch.ones(2**20) for _ in range(6)]  # of 4 MiB

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5

faults()
print(faults())
"""


def page_faults(level, **variables):
    """Returns the page faults of a step that frees 24 MiB, which has 6,144 pages of 4 KiB."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    run = subprocess.run(
        [sys.executable, "-c", STEPS, level],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_a_step_gets_the_memory_that_the_last_one_freed():
    assert page_faults("none") > 1000
    assert page_faults("O0") < 100
    assert page_faults("O5") < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_the_users_own_limit_stays():
    assert page_faults("O5", MALLOC_TRIM_THRESHOLD_="1000000") > 1000
