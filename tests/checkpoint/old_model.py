"""The model in ``data/release_0_1.pt``, a file of whole objects that the release of 2026-11 wrote.

That release ran ``save``.
"""

import torch
from torch import nn

from apex import amp

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


def step(model, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch()).float(), batch())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def step_plain(model, optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch()), batch()).backward()
    optimizer.step()


def trained(level):
    torch.manual_seed(0)
    model = Old()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = {"fp32_modules": ["kept"]} if level in ("O2", "O3", "O5") else {}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0, **own)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def save(path):
    saved = {}
    for level in LEVELS:
        model, optimizer = trained(level)
        saved[level] = {
            "pair": (model, optimizer),
            "part": model.frozen,
            "state": {name: value.clone() for name, value in model.state_dict().items()},
            "masters": [param.detach().clone() for param in amp.master_params(optimizer)],
            "output": model.eval()(batch()).detach(),
        }
    torch.save(saved, path)
