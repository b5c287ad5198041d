"""A small decoder whose parts compute with non-persistent buffers, as models do today."""

import torch
from torch import nn


class Rotary(nn.Module):
    """Rotary embedding as transformers' Llama has it: fp32 inside, the input's dtype out."""

    def __init__(self, dim=8, *, persistent=False):
        super().__init__()
        inverse = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inverse, persistent=persistent)

    def forward(self, x, positions):
        inverse = self.inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
        angles = (inverse @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class UncastRotary(Rotary):
    """One that takes its dtype from the buffer and casts nothing back, as older ones do."""

    def forward(self, x, positions):
        t = torch.arange(16, dtype=self.inv_freq.dtype)
        angles = torch.einsum("i,j->ij", t, self.inv_freq)[positions]
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()


class Positions(nn.Module):
    """Adds a table of positions to what it is given."""

    def __init__(self, dim=8, *, persistent=False):
        super().__init__()
        self.register_buffer("table", torch.randn(16, dim), persistent=persistent)

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Decoder(nn.Module):
    """Attention with rotary embeddings over positions that are added."""

    def __init__(self, rotary=Rotary):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.add = Positions()
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 11)
        self.norm = nn.LayerNorm(8)
        self.rotary = rotary()
        mask = torch.full((16, 16), -1e4).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("temperature", torch.tensor(0.7), persistent=False)

    def forward(self, ids):
        h = self.add(self.embed(ids))
        cos, sin = self.rotary(h, torch.arange(ids.shape[1], device=ids.device)[None])
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        q, k = (t * cos + torch.roll(t, 4, -1) * sin for t in (q, k))
        scores = q @ k.mT / self.temperature + self.mask[: ids.shape[1], : ids.shape[1]]
        return self.head(h + self.out(scores.softmax(-1) @ v))


def ids():
    return torch.arange(12).reshape(2, 6) % 11
