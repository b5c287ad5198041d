"""The model in ``data/release_0_1.pt``, a file of whole objects that the release of 2026-11 wrote.

It holds, by level, a trained pair, a part, the state dict, the masters, and the model's output.
"""

import torch
from torch import nn

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Old(nn.Module):
    """Tied weights, batch norm, a part in fp32, buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.kept = nn.Sequential(nn.LayerNorm(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 1 / 3))
        self.register_buffer("inv_freq", torch.full((4,), 1 / 3), persistent=False)
        self.register_buffer("table", torch.full((4,), 1 / 3), persistent=False)

    def forward(self, ids):
        x = self.frozen(self.kept(self.norm(self.embed(ids) * self.scale))) + self.table
        return self.head(x * self.inv_freq.to(x.dtype))


def batch():
    return torch.tensor([0, 1, 2, 3, 4])


def step_plain(model, optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch()), batch()).backward()
    optimizer.step()
