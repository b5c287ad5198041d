"""`make gpu`, rehearsed on the emulated device, and what it says when something fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.networks import Bert, ResNet
from tests.support.emulated_cuda import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """The folder with the results of a run with tiny networks and one file of tests."""
    try:
        build.library()
    except build.Unavailable as reason:
        pytest.skip(f"no emulated CUDA: {reason}")
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "tests.support.emulated_cuda", "benchmarks.gpu", "--tiny"]
    run = subprocess.run(
        [*command, "--results", str(folder), "--tests", "tests/_core/test_finite.py"],
        check=False, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_a_rehearsal_writes_every_row_of_the_table(rehearsal):
    found = json.loads((rehearsal / "emulated-cuda.json").read_text())
    assert found["failed"] == []
    ours, closing = found["tests"].splitlines()
    assert ours == "executed 1 of 1 tests: 1 on emulated CUDA"
    assert "1 passed" in closing
    assert "test_finite.py" in (rehearsal / "emulated-cuda-tests.txt").read_text()
    assert len(found["checks"]) == 8
    assert set(found["checks"].values()) == {"ok"}
    assert found["networks"].keys() == {"ResNet-50", "BERT-base"}
    for network in found["networks"].values():
        rows = network["rows"]
        assert [row["mode"] for row in rows] == list(gpu.modes())
        assert all(row["rate"] > 0 and row["peak"] > 0 and row["error"] is None for row in rows)
        fp32, *others = (row["losses"] for row in rows)
        assert fp32[0] > fp32[-1]
        for losses in others:
            assert losses == pytest.approx(fp32, rel=0.1, abs=0.02)


@pytest.mark.slow
def test_a_rehearsal_writes_the_same_as_a_page(rehearsal):
    found = json.loads((rehearsal / "emulated-cuda.json").read_text())
    page = (rehearsal / "emulated-cuda.md").read_text()
    for network in found["networks"].values():
        for row in network["rows"]:
            assert f"| {row['mode']} | {row['rate']:.1f} | " in page
    assert page == gpu.markdown(gpu.Findings(**found))


def test_without_a_gpu_it_says_what_to_do():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        check=False, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    assert "make gpu needs a GPU" in run.stderr
    assert "make gpu PYTHON=" in run.stderr
    assert run.stdout == ""


def test_a_row_that_fails_says_why_and_the_page_shows_it():
    def build(task):
        raise torch.OutOfMemoryError("no memory left\nfor the batch")

    network = gpu.networks(tiny=True)["BERT-base"]
    row = gpu.attempted(network, "O1", build, 0.1)
    assert (row.rate, row.peak) == (None, None)
    assert row.error.startswith("OutOfMemoryError: no memory left (test_gpu.py:")
    rows = [vars(gpu.Row("fp32", 2.0, 1.0, [1.0, 0.5, 0.25, 0.125])), vars(row)]
    networks = {"BERT-base": {"unit": "sequences", "batch": 2, "rows": rows}}
    page = gpu.markdown(gpu.Findings({"device": "card"}, "today", networks=networks))
    assert "| fp32 | 2.0 | 1.00x | 1 | 1.0000, 0.5000, 0.2500, 0.1250 |" in page
    assert f"| O1 | {row.error} | | | |" in page


def test_tests_that_fail_are_named(tmp_path):
    file = tmp_path / "test_broken.py"
    file.write_text("import nothing_of_this_name\n")
    told, passed = gpu.run_tests([file], tmp_path / "output.txt")
    assert not passed
    first, *_, last = told.splitlines()
    assert first.startswith("FAILED ")
    assert first.endswith("test_broken.py")
    assert "1 error" in last
    assert "nothing_of_this_name" in (tmp_path / "output.txt").read_text()


def test_failures_are_read_from_what_pytest_says_as_it_goes():
    lines = [
        "tests/a.py::test_one[x] PASSED    [ 1%]",
        "tests/a.py::test_two[y-1] FAILED  [ 2%]",
        "[gw1] [  3%] FAILED tests/b.py::test_three ",
        "[gw0] [  4%] PASSED tests/b.py::test_four ",
        "FAILED tests/b.py::test_three - AssertionError: assert 1 == 2",
        "ERROR tests/c.py",
        "E   AssertionError: the test FAILED on purpose",
    ]
    named = ["tests/a.py::test_two[y-1]", "tests/b.py::test_three", "tests/c.py"]
    assert gpu.failures(lines) == [f"FAILED {name}" for name in named]


def test_only_files_with_tests_for_a_gpu_are_collected():
    files = {path.relative_to(ROOT).as_posix() for path in gpu.gpu_tests()}
    assert {"tests/names/test_optimizers.py", "tests/support/emulated_cuda/test_steps.py"} <= files
    assert "tests/_core/test_tree.py" not in files


@pytest.mark.parametrize(
    ("network", "millions"), [(ResNet, 25.557), (Bert, 109.482)], ids=["ResNet-50", "BERT-base"]
)
def test_the_networks_have_the_size_of_their_papers(network, millions):
    with torch.device("meta"):
        params = sum(param.numel() for param in network().parameters())
    assert params / 1e6 == pytest.approx(millions, abs=0.001)
