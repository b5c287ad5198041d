"""What a run does before its tests, and says at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_run_says_how_many_tests_executed_before_the_closing_line(tmp_path, workers):
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    pytest_line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest"]
    run = subprocess.run(
        [*pytest_line, *workers, "--rootdir", str(tmp_path), "-c", "/dev/null", str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *_, ours, closing = run.stdout.splitlines()
    assert ours == (
        "executed 4 of 8 tests: 4 on the CPU; 4 skipped: 3 needs a CUDA device, 1 needs a key"
    ), run.stdout + run.stderr
    assert closing.startswith("1 failed, 2 passed, 4 skipped, 1 xfailed, 1 error")


def test_yapf_s_cache_is_written_before_several_workers_read_it(tmp_path):
    pytest.importorskip("yapf")
    file = tmp_path / "test_none.py"
    file.write_text("def test_nothing(): pass")
    pytest_line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest"]
    cache = tmp_path / "cache"
    subprocess.run(
        [*pytest_line, "-n", "2", "--rootdir", str(tmp_path), "-c", "/dev/null", str(file)],
        cwd=ROOT, env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(path.name.split("-")[0] for path in cache.rglob("*.pickle")) == [
        "Grammar",
        "PatternGrammar",
    ]
