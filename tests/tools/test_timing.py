"""Times: trainers take turns, the first step does not count, and what a spread is."""

import math

import pytest
import torch

from apex.tools import timing
from apex.tools.results import Timing
from apex.tools.timing import slowdown, time_interleaved

CPU = torch.device("cpu")


class Noted:
    """A trainer that notes who trains."""

    def __init__(self, name, steps):
        self.name, self.steps = name, steps

    def backward(self, batch):
        self.steps.append((self.name, batch))

    def step(self):
        pass


@pytest.mark.parametrize("short", [False, True])
def test_trainers_take_turns_after_one_step_each_that_is_not_counted(short, monkeypatch):
    monkeypatch.setattr(timing, "_SHORT", math.inf if short else 0.0)
    steps, ticks = [], []
    trainers = {name: Noted(name, steps) for name in ("O0", "O1", "O4")}
    rounds = {"O0": 3, "O1": 1, "O4": 3}
    found = time_interleaved(trainers, "batch", rounds, device=CPU, on_step=lambda: ticks.append(1))
    first, turns = ["O0", "O1", "O4"], ["O0", "O1", "O4", "O0", "O4", "O0", "O4"]
    # A short step follows another of the same trainer.
    expected = [*first, *(name for name in turns for _ in range(1 + short))]
    assert steps == [(name, "batch") for name in expected]
    assert len(ticks) == len(first) + len(turns)
    assert {name: len(each.samples) for name, each in found.items()} == rounds


def test_a_timing_is_the_median_and_the_ends_of_the_middle_half():
    several = Timing((9.0, 1.0, 2.0, 4.0, 3.0))
    assert (several.median, several.quartiles) == (3.0, (2.0, 4.0))
    assert (Timing((5.0,)).median, Timing((5.0,)).quartiles) == (5.0, (5.0, 5.0))


def test_fp32_is_what_other_dtypes_are_measured_against():
    assert slowdown(torch.float32, CPU) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_looking_for_emulation_leaves_the_number_of_threads(dtype):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert slowdown(dtype, CPU) > 0.0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
