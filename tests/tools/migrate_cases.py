"""Small programs that train with amp, and how to run them."""

import gc
import textwrap
from pathlib import Path

import torch

from apex.tools.migrate.script import Script
from apex.tools.migrate.to_torch.rewriting import rewritten

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from apex import amp

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
batches = [(torch.randn(5, 6), torch.randint(3, (5,)))] * 8
losses = []
"""
"""A net, an optimizer, batches, and a list for what the program is judged by."""

PLAIN = HEAD + (
    """
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for x, y in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
)
"""The three lines, at O1."""


def text_of(program):
    """Returns the program without the indentation that a test wrote it with."""
    return textwrap.dedent(program)


def script_of(program, path="script.py"):
    """Returns it, read."""
    return Script(Path(path), text_of(program))


def to_torch(program, level=None):
    """Returns what it becomes, and the remarks on that."""
    result = rewritten(script_of(program), level=level)
    assert result.after is not None, [remark.text for remark in result.refusals]
    return result.after, [remark.text for remark in result.notes]


def refusals(program, level=None):
    """Returns line and reason for all that keeps a program from being rewritten."""
    result = rewritten(script_of(program), level=level)
    assert result.after is None
    return [(remark.line, remark.text) for remark in result.refusals]


def losses_of(program):
    """Runs it and returns its losses; nothing of it stays."""
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    exec(compile(text_of(program), "program", "exec"), names)
    losses = list(names["losses"])
    names.clear()
    gc.collect()  # amp's casts end with the model
    return losses


def trained(program):
    """Returns the losses of a program before and after."""
    return losses_of(program), losses_of(to_torch(program)[0])


def changed_lines(before, after):
    """Returns the lines that only the new program has."""
    old = {line.strip() for line in before.splitlines()}
    return [line.strip() for line in after.splitlines() if line.strip() not in old]
