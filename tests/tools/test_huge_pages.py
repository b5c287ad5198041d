"""What the doctor says of huge memory pages."""

import dataclasses
import sys

import pytest
import torch

from apex.tools.doctor import examination, huge_pages
from apex.tools.doctor.examination import examine
from apex.tools.doctor.huge_pages import SETTINGS, HugePages
from apex.tools.paired import Interval

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of Linux")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@ON_LINUX
def test_it_measures_each_setting_in_a_process_of_its_own():
    found = huge_pages.measure(rounds=1, width=16)
    assert found.setting in {f"{name}={value}" for name, value in SETTINGS.items()}
    assert found.gain.median > 0
    assert not found.worth_it  # one round decides nothing


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_there_already_is_not_measured_again(name, monkeypatch):
    monkeypatch.setenv(name, SETTINGS[name])
    assert huge_pages.measure(rounds=1, width=16) is None


@ON_LINUX
def test_a_process_that_fails_gives_no_result(monkeypatch):
    monkeypatch.setattr(huge_pages, "_PROGRAM", "raise SystemExit(1)")
    assert huge_pages.measure(rounds=1, width=16) is None


@pytest.mark.parametrize(
    ("low", "said"),
    [(2.0, "Set THP_MEM_ALLOC_ENABLE=1 in the environment"), (0.5, "gain nothing here")],
)
def test_the_report_says_what_to_set_if_it_gains(low, said, monkeypatch):
    times = [[2.0] * 6, [2.0 / low] * 6, [2.0] * 6]
    monkeypatch.setattr(huge_pages, "_seconds", lambda *args: times)
    monkeypatch.setattr(sys, "platform", "linux")
    found = huge_pages.measure()
    monkeypatch.setattr(examination.huge_pages, "measure", lambda: found)
    health = dataclasses.replace(examine(torch.device("cpu"), budget=0.0), huge_pages=found)
    if low > 1:
        assert found == HugePages("THP_MEM_ALLOC_ENABLE=1", Interval(low, low, low), True)
    assert said in " ".join(str(health).split())
    assert health.to_dict()["huge_pages"]["worth_it"] is (low > 1)


def test_a_gain_within_the_noise_is_neither_promised_nor_denied():
    text = str(HugePages("THP_MEM_ALLOC_ENABLE=1", Interval(1.8, 0.9, 2.1), False))
    assert text.startswith("Could not tell whether huge memory pages")
    assert "0.9 to 2.1 times as fast" in text


def test_a_quick_examination_does_not_measure_it():
    assert examine(torch.device("cpu"), budget=0.0).huge_pages is None
