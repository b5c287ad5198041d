"""What holds on a CUDA device, checked on one that g++ makes of the CPU: see device.py.

The device changes the process for good, so the checks run in one of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUN = "import sys, tests.emulated_cuda.device, pytest; sys.exit(pytest.main(sys.argv[1:]))"

# With a CUDA device `torch._dynamo.reset` loads inductor, and that a deprecated part of torch.
IGNORED = ["-W", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"]


@pytest.fixture(scope="module")
def device():
    try:
        build.library()
    except build.Unavailable as reason:
        pytest.skip(f"no emulated CUDA: {reason}")


def passed(*arguments):
    """Runs pytest with the device; returns how many tests passed, and fails with what failed."""
    command = [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--import-mode=importlib", "--tb=short", *IGNORED, *map(str, arguments)]
    result = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    return int(re.search(r"(\d+) passed", result.stdout)[1])


def test_checks_of_copies_scales_and_steps_pass_on_emulated_cuda(device):
    assert passed("-o", "python_files=checks_*.py", HERE) > 150


# Without what the device lacks: cuDNN's RNNs, CUDA graphs, several processes.
FOR_A_GPU = ["_core", "_engine/test_scaler.py", "optimizers", "training", "checkpoint/test_gpu.py"]


def test_the_tests_for_a_gpu_pass_on_emulated_cuda(device):
    assert passed("-m", "gpu", *(ROOT / "tests" / name for name in FOR_A_GPU)) > 100
