"""Why a step was skipped: which gradients were non-finite."""

import pytest
import torch

from apex.amp.report import NonfiniteGradient
from apex.debug.check import why_skipped
from tests.support.steps import LEVELS, backward, loss_of, prepared


def break_two(model, optimizer):
    first = model.first.weight * torch.tensor([1.0, torch.inf, 1.0, 1.0]).to(
        model.first.weight.device
    )
    loss = first.float().sum() + (model.last.bias.float() * torch.nan).sum()
    backward(loss / 256, optimizer)  # at the first scale a gradient of 1 is too much for fp16


EXPECTED = [NonfiniteGradient("first.weight", 6, 0, 24), NonfiniteGradient("last.bias", 0, 2, 2)]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_nonfinite_gradients_are_named_and_counted(level, stepped):
    model, optimizer = prepared(level)
    break_two(model, optimizer)
    if stepped and level in ("O1", "O2"):
        optimizer.step()
    assert why_skipped(optimizer) == EXPECTED


def test_finite_or_cleared_gradients_are_not_listed():
    model, optimizer = prepared("O2")
    assert why_skipped(optimizer) == []
    backward(loss_of(model) / 2**16, optimizer)
    assert why_skipped(optimizer) == []
    break_two(model, optimizer)
    optimizer.zero_grad()
    assert why_skipped(optimizer) == []
