"""What a run says at its end."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest
def test_one(): pass
def test_two(): assert False
@pytest.mark.skip(reason="needs a key")
def test_three(): pass
@pytest.mark.parametrize("number", range(3))
def test_four(number): pytest.skip("needs a CUDA device")
@pytest.mark.xfail(strict=True)
def test_five(): assert False
@pytest.fixture
def bad(): yield; assert False
def test_six(bad): pass
"""


def test_a_run_says_how_many_tests_executed_before_the_closing_line(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    line = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "-n", "1"]
    done = subprocess.run(
        [sys.executable, *line, "--rootdir", str(tmp_path), "-c", "/dev/null", str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *_, ours, closing = done.stdout.splitlines()
    assert ours == (
        "executed 4 of 8 tests: 4 on the CPU; 4 skipped: 3 needs a CUDA device, 1 needs a key"
    ), done.stdout + done.stderr
    assert closing.startswith("1 failed, 2 passed, 4 skipped, 1 xfailed, 1 error")
