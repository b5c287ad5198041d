"""What amp costs in a model of many tensors: operators and calls per tensor."""

import sys

import torch

from apex import amp
from tests.support import training as cases


def calls_of(call):
    """The number of functions that Python calls, builtin ones included."""
    count = [0]

    def profile(frame, event, arg):
        count[0] += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count[0]


def work_of_initialize(count):
    model = many_tensors(count)
    optimizer = torch.optim.AdamW(model.parameters())
    return calls_of(lambda: amp.initialize(model, optimizer, opt_level="O5", verbosity=0))


def many_tensors(count):
    parts = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)) for _ in range(count // 4)
    )
    return torch.nn.Sequential(*parts)


def work_of_a_group(count, level):
    body, head = many_tensors(count), torch.nn.Linear(4, 2)
    model, optimizer = cases.prepared(level, model=torch.nn.Sequential(body))
    model.append(head)
    return calls_of(lambda: optimizer.add_param_group({"params": [*head.parameters()]}))
