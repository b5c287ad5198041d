"""`make gpu`, rehearsed on the emulated device, and what it says when something fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import page
from benchmarks.gpu.__main__ import RESULTS, main
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import Records
from benchmarks.gpu.training import MODES, NETWORKS
from tests.support.emulated_cuda import build

ROOT = Path(__file__).parents[2]

WHERE = "make stress rehearses make gpu"
rehearsed = pytest.mark.skipif(not os.environ.get("STRESS"), reason=WHERE)


@rehearsed
@pytest.mark.emulated
def test_a_check_that_crashes_or_hangs_loses_itself_alone(tmp_path, monkeypatch, capfd):
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


@rehearsed
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
    failed = set()
    for part in PARTS:
        lines = records.results(part)
        failed.update((part, check) for check, line in lines.items() if "error" in line)
    resnets = {part for part in PARTS if part.startswith("ResNet")}  # a captured pooling crashes
    assert {part for part, _ in failed} == {"facts", "nccl", "faults", *resnets}
    for name in NETWORKS.keys() - resnets:
        for part in (name, f"{name}, compiled"):
            results = records.results(part)
            expected = pytest.approx(records.results(name)["bf16"]["result"]["loss"], rel=0.05)
            assert [results[mode]["result"]["loss"] for mode in MODES] == [expected] * len(MODES)
    for line in records.results("graphs").values():
        assert line["result"] == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit, match=r"make gpu needs a GPU.*make gpu PYTHON="):
        main()


def test_a_page_shows_the_parts_of_two_runs_and_times_relative_to_autocast(tmp_path):
    first, second = Records(tmp_path / "first.jsonl"), Records(tmp_path / "second.jsonl")
    for records, dtype in ((first, torch.float16), (second, torch.bfloat16)):
        records.write(part="machine", check="machine", result={"device": str(dtype)})
    first.write(part="waits", check="O1", result="no host sync")
    first.write(part="BERT-large", check="fp16", result={"ms": 1.0})
    second.write(part="BERT-large", check="O2", begun=True)
    second.write(part="BERT-large", check="fp16", result={"ms": 10.0, "ms as a graph": 8.0})
    second.write(part="BERT-large", check="O2", result={"ms": 9.0, "ms as a graph": 6.0})
    second.write(part="BERT-large", check="O5", error="over its 60 s")
    first.adopt(second)
    assert page.summary(first).splitlines()[2] == "| BERT-large |  | 0.90, 0.75 |  |  |"
    text = page.markdown(first)
    for line in ("# torch.bfloat16", "| O1 | no host sync |", "**over its 60 s**"):
        assert line in text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_pages_and_the_page_on_devices_show_the_committed_results(path):
    records = Records(path)
    assert path.with_suffix(".md").read_text("utf-8") == page.markdown(records)
    assert page.summary(records) in (ROOT / "docs/concepts/devices.md").read_text("utf-8")
