"""`make gpu`, rehearsed on the emulated device, and what it says when something fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.support.emulated_cuda import build

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not os.environ.get("STRESS"), reason="make stress rehearses make gpu")
def test_a_rehearsal_writes_every_row_of_the_table(tmp_path):
    """A run with tiny networks and one file of tests."""
    try:
        build.library()
    except build.Unavailable as reason:
        pytest.skip(f"no emulated CUDA: {reason}")
    command = [sys.executable, "-m", "tests.support.emulated_cuda", "benchmarks.gpu", "--tiny"]
    run = subprocess.run(
        [*command, "--results", str(tmp_path), "--tests", "tests/debug/test_skips.py"],
        check=False, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    found = json.loads((tmp_path / "emulated-cuda.json").read_text())
    assert found["failed"] == []
    ours, closing = found["tests"].splitlines()
    assert re.fullmatch(r"executed (\d+) of \1 tests: \1 on emulated CUDA", ours)
    assert " passed" in closing
    assert "test_skips.py" in (tmp_path / "emulated-cuda-tests.txt").read_text()
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit, match=r"make gpu needs a GPU.*make gpu PYTHON="):
        gpu.main()
