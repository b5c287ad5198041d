"""Why a step was skipped: which gradients were non-finite."""

import pytest
import torch

from apex.amp.report import NonfiniteGradient
from apex.debug.check import why_skipped
from tests.support.loops import LEVELS, Net, batch, net, prepared, scaled_backward, sgd, small_loss


def break_two(model, optimizer):
    first = model.first.weight * torch.tensor([1.0, torch.inf, 1.0, 1.0]).to(
        model.first.weight.device
    )
    loss = first.float().sum() + (model.last.bias.float() * torch.nan).sum()
    scaled_backward(loss / 256, optimizer)  # a gradient of 1 is too much for fp16


EXPECTED = [NonfiniteGradient("first.weight", 6, 0, 24), NonfiniteGradient("last.bias", 0, 2, 2)]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_nonfinite_gradients_are_named_and_counted(level, stepped):
    model, optimizer = prepared(level, model=Net())
    break_two(model, optimizer)
    if stepped and level in ("O1", "O2"):
        optimizer.step()
    assert why_skipped(optimizer) == EXPECTED


def test_finite_or_cleared_gradients_are_not_listed():
    model, optimizer = prepared("O2", model=Net())
    assert why_skipped(optimizer) == []
    scaled_backward(small_loss(model) / 2**16, optimizer)
    assert why_skipped(optimizer) == []
    break_two(model, optimizer)
    optimizer.zero_grad()
    assert why_skipped(optimizer) == []


def test_why_skipped_names_the_gradients_of_a_plain_loop():
    model = net()
    optimizer = sgd(model.parameters())
    assert why_skipped(optimizer) == []
    (model(batch()[0]).sum() + model[2].bias[0] * torch.inf).backward()
    found = why_skipped(optimizer, model=model)
    assert [(item.name, item.inf) for item in found] == [("2.bias", 1)]
    (unnamed,) = why_skipped(optimizer)
    assert unnamed.name == "parameter 3"
