"""Ctrl-C at any line of ``amp.initialize``: the script's objects and amp are as before it."""

from __future__ import annotations

import pytest
import torch

from apex import amp
from apex.amp._amp_state import _amp_state
from tests.training import cases

SCALE = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}}


def fresh():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepare(level, model, optimizer):
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)


def is_plain(model, optimizer, params):
    held = [*model.parameters(), *optimizer.param_groups[0]["params"]]
    return (
        all(one is other for one, other in zip(held, params * 2, strict=True))
        and {param.dtype for param in params} == {torch.float32}
        and (type(model), type(optimizer)) == (torch.nn.Linear, torch.optim.SGD)
        and not _amp_state.sessions()
        and bool(_amp_state.pending_states)
    )


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_an_interrupt_at_any_line_leaves_everything_as_it_was(level):
    prepare(level, *fresh())  # what is done once a process is done
    line, prepared = 0, []
    while True:
        model, optimizer = fresh()
        amp.load_state_dict(SCALE)  # which no session is there to take
        params = list(model.parameters())
        if not cases.interrupted_at(line, lambda m=model, o=optimizer: prepare(level, m, o)):
            break
        if not is_plain(model, optimizer, params):
            prepared.append(line)
        line += 1
    # The lines that close the undo stack; Python takes no signals between calls, where they are.
    assert set(prepared) <= {line - 1, line - 2}
    assert line > 1000
    assert amp.state_dict() == SCALE
