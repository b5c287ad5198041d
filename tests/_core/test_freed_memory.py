"""glibc's malloc keeps what a step frees, once a model on the CPU was prepared."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    getattr(ctypes.CDLL(None), "mallinfo2", None) is None, reason="asks glibc's malloc (2.33)"
)

# A fresh process each, as the limits are those of the process. Memory that malloc takes from the
# system for one block goes back to it with the block; that of its heap is kept up to a limit twice
# as large as the largest such block freed so far.
STEP = """
import ctypes, sys
import torch
from apex import amp

class Statistics(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Statistics

if sys.argv[1] != "none":
    amp.initialize(torch.nn.Linear(2, 2), opt_level=sys.argv[1], verbosity=0)
before = libc.mallinfo2().hblkhd
gradient = torch.empty(31, 2**20, dtype=torch.uint8)
print(libc.mallinfo2().hblkhd - before >= gradient.numel())
"""


def goes_back(level, **variables):
    """Returns whether a block of 31 MiB goes back to the system when it is freed."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    run = subprocess.run(
        [sys.executable, "-c", STEP, level],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout == "True\n"


def test_a_step_finds_the_memory_that_the_last_one_freed():
    assert goes_back("none")
    assert not goes_back("O0")
    assert not goes_back("O5")


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_the_users_own_limit_stays(variable):
    assert goes_back("O5", **{variable: "131072"})
