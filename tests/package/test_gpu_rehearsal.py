"""`make gpu`, rehearsed on the emulated device, and what it says when something fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import Records
from tests.support.emulated_cuda import build

ROOT = Path(__file__).parents[2]


@pytest.mark.emulated
def test_checks_that_crash_and_hang_lose_themselves_only_and_a_second_call_goes_on(
    tmp_path, monkeypatch, capfd
):
    def rehearse(*arguments):
        command = ["benchmarks.gpu", "--tiny", "--results", str(tmp_path), "facts", "faults"]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        main()

    with pytest.raises(SystemExit, match=r"^Unfinished: facts, faults\."):
        rehearse("--seconds", "0")
    rehearse()
    records = Records(tmp_path / "emulated-cuda.jsonl")
    crashed = {"part": "faults", "check": "crashes", "error": "its process ended with 3"}
    hung = {"part": "faults", "check": "hangs", "error": "over its 4 s"}
    results = records.results("faults")
    assert list(results) == ["before", "crashes", "hangs", "after"], capfd.readouterr().err[-4000:]
    assert [results["crashes"], results["hangs"]] == [crashed, hung]
    assert results["before"]["result"] == results["after"]["result"] == "ends"
    assert len(records.results("facts")) == 4
    page = records.path.with_suffix(".md").read_text()
    assert "| hangs | **over its 4 s** |" in page
    before = records.lines()
    rehearse()
    assert records.lines() == before


def test_a_check_whose_call_was_ended_begins_once_more(tmp_path):
    records = Records(tmp_path / "lines.jsonl")
    for due in (True, True, False):
        assert records.is_due("part", "check") is due
        records.write(part="part", check="check", begun=True)
    with records.path.open("a") as file:
        file.write(json.dumps({"part": "part", "check": "check", "result": 1})[:-4])
    assert records.results("part") == {}


@pytest.mark.skipif(not os.environ.get("STRESS"), reason="make stress rehearses make gpu")
def test_a_whole_rehearsal_fails_where_the_emulation_lacks_something(tmp_path):
    try:
        build.library()
    except build.Unavailable as reason:
        pytest.skip(f"no emulated CUDA: {reason}")
    command = [sys.executable, "-m", "tests.support.emulated_cuda", "benchmarks.gpu", "--tiny"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path), "--seconds", "2400"],
        check=False, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    records = Records(tmp_path / "emulated-cuda.jsonl")
    assert done.returncode == 0, done.stderr[-4000:]
    failed = {
        (part, check)
        for part in PARTS
        for check, line in records.results(part).items()
        if "error" in line
    }
    assert {part for part, _ in failed} == {"facts", "nccl", "faults"}
    networks = records.results("networks")
    for check, line in networks.items():
        network, _, *layout = check.split(", ")
        fp32 = networks[", ".join([network, "fp32", *layout])]
        expected = pytest.approx(fp32["result"]["losses"], rel=0.15, abs=0.05)
        assert line["result"]["losses"] == expected
    for line in records.results("graphs").values():
        assert line["result"] == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit, match=r"make gpu needs a GPU.*make gpu PYTHON="):
        main()
