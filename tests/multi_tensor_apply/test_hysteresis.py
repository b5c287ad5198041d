"""The loss scale with hysteresis against its plain loop."""

import pytest
import torch

import amp_C
from tests.multi_tensor_apply.lists import (
    flag,
)
from tests.optimizers import cases


class PlainHysteresis:
    """The rule on host numbers."""

    def __init__(self, scale, interval, hysteresis):
        self.scale, self.steps, self.left = scale, 0, hysteresis
        self.interval, self.hysteresis = interval, hysteresis

    def update(self, overflow):
        if overflow:
            self.left -= 1
            self.steps = 0
            if self.left <= 0:
                self.scale *= 0.5
            return
        self.left = self.hysteresis
        self.steps += 1
        if self.steps == self.interval:
            self.steps = 0
            if self.scale * 2.0 < 2.0**128:
                self.scale *= 2.0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_is_its_plain_loop(hysteresis):
    reference = PlainHysteresis(2.0**16, 3, hysteresis)
    scale, steps = torch.tensor([2.0**16]), flag()
    left = flag(hysteresis)
    for overflow in [0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1]:
        reference.update(overflow)
        found = torch.tensor([float(overflow)])
        with cases.HostReads() as reads:
            returned = amp_C.update_scale_hysteresis(
                scale, steps, left, found, 2.0, 0.5, 3, hysteresis
            )
        assert reads.count == 0
        assert returned is scale
        assert (scale.item(), steps.item(), left.item()) == (
            reference.scale, reference.steps, reference.left
        )  # fmt: skip


def test_hysteresis_stops_growing_at_the_end_of_fp32():
    scale = torch.tensor([2.0**127])
    amp_C.update_scale_hysteresis(scale, flag(), flag(1), torch.zeros(1), 2.0, 0.5, 1, 1)
    assert scale.item() == 2.0**127


def test_hysteresis_takes_0_d_tensors():
    scale, steps, left = torch.tensor(8.0), torch.tensor(0), torch.tensor(1)
    amp_C.update_scale_hysteresis(scale, steps, left, torch.ones(1), 2.0, 0.5, 4, 1)
    assert (scale.item(), left.item()) == (4.0, 0)
