"""Small models, prepared by ``amp.initialize`` in bf16, and their masters."""

import torch
from torch import nn

from apex import amp

LOW = torch.bfloat16


class BufferNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("shift", torch.full((2,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


class Echo(nn.Module):
    """Returns what it was given, and keeps it to look at."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return args[0] if args else None


def converted(model, level="O5", **options):
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


def exact_of(model, optimizer, name):
    masters = amp.master_params(optimizer)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, masters, strict=True))[name]


def x():
    return torch.linspace(-1, 1, 12).view(4, 3)


def dtypes_of(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.dtype for name, tensor in tensors}
