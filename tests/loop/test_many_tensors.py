"""What amp costs in a model of many tensors: operators and calls per tensor."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp
from tests.support import training as cases


class Operators(TorchDispatchMode):
    """Counts the operators that reach a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_of(call):
    with Operators() as counted:
        call()
    return counted.count


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


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_state_dict_runs_no_operator_per_tensor_beside_torchs_own(level):
    count = 400
    own = operators_of(many_tensors(count).state_dict)
    model, _ = cases.prepared(level, model=many_tensors(count))
    assert operators_of(model.state_dict) - own <= 0.03 * count


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_state_dict_takes_few_calls_per_tensor_in_a_model_of_any_size(level):
    for count in (400, 1600):
        own = calls_of(many_tensors(count).state_dict)
        model, _ = cases.prepared(level, model=many_tensors(count))
        assert calls_of(model.state_dict) - own <= 22 * count


def work_of_a_group(count, level):
    body, head = many_tensors(count), torch.nn.Linear(4, 2)
    model, optimizer = cases.prepared(level, model=torch.nn.Sequential(body))
    model.append(head)
    return calls_of(lambda: optimizer.add_param_group({"params": [*head.parameters()]}))
