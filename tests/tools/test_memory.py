"""The bytes that a comparison counts."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from apex.debug.storages import Storages
from apex.tools.memory import growth, stored


def test_state_in_wrappers_counts_by_what_they_hold():
    """Optimizers with 8-bit moments keep them in tensors without a storage of their own."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["moment"] = TwoTensor(torch.zeros(16), torch.zeros(16))
    assert stored(model, optimizer).optimizer == 2 * 16 * 4


def test_growth_is_the_most_that_is_allocated_at_once():
    cpu, kept = torch.device("cpu"), torch.ones(1000)

    def work():
        first = kept * 2
        del first
        both = kept + 1, kept + 2
        del both

    assert growth(work, cpu) == pytest.approx(2 * 4000, abs=32)  # and the numbers as tensors
    assert growth(lambda: None, cpu) == 0
    assert growth(work, torch.device("meta")) is None


def test_the_profiler_behind_the_growth_writes_nothing():
    """In a process of its own, because the tests' has silenced torch's log since its start."""
    code = (
        "import os, torch\n"
        "from apex.tools.memory import growth\n"
        "growth(lambda: os.write(2, b'kept'), torch.device('cpu'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if "KINETO" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "kept")


def test_saved_tensors_count_by_storage_and_without_what_is_ignored():
    model = nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8, requires_grad=True)
    whole, own = Storages(), Storages(model.parameters())
    for storages in (whole, own):
        with storages.of_saved_tensors():
            model(x).pow(2).sum()
    assert own.total == (4 * 8 + 4 * 8) * 4
    assert whole.total == own.total + 8 * 8 * 4
