"""The bytes that a comparison counts."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from apex.tools.memory import stored


def test_state_in_wrappers_counts_by_what_they_hold():
    """Optimizers with 8-bit moments keep them in tensors without a storage of their own."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["moment"] = TwoTensor(torch.zeros(16), torch.zeros(16))
    assert stored(model, optimizer).optimizer == 2 * 16 * 4
