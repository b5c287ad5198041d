"""The process that has the device: reports come back, and a crash is one failed test."""

import pytest

from tests.support.emulated_cuda import build
from tests.support.emulated_cuda.process import Process

TESTS = """
import os, pytest, torch
@pytest.fixture(scope="module")
def place(): return torch.ones(1, device="cuda").device
def test_passes(place): assert str(place) == "cuda:0"
def test_fails(place): assert place.index == 1
def test_crashes(): os._exit(3)
"""


@pytest.fixture
def process(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from tests.support.emulated_cuda import device\ndevice.install()\n"
    )
    (tmp_path / "test_some.py").write_text(TESTS)
    try:
        process = Process([tmp_path / "test_some.py"], rootdir=tmp_path)
    except build.Unavailable as reason:
        pytest.skip(f"no emulated CUDA: {reason}")
    yield process
    process.stop()


def outcomes(process, name):
    reports = process.reports(f"test_some.py::{name}", None)
    return [(report["when"], report["outcome"]) for report in reports]


def test_reports_are_those_of_a_run_here(process):
    around = ("setup", "passed"), ("teardown", "passed")
    assert outcomes(process, "test_passes") == [around[0], ("call", "passed"), around[1]]
    assert outcomes(process, "test_fails") == [around[0], ("call", "failed"), around[1]]


def test_a_crash_raises_with_what_was_written(process):
    with pytest.raises(EOFError, match=r"has died:\n(.|\n)*test session starts"):
        outcomes(process, "test_crashes")
    assert process.process.returncode == 3
