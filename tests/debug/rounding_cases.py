"""Models in which low precision loses digits, and models in which it does not."""

import functools
import math
from collections import OrderedDict
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.support.loops import Body, scaled_backward

MODES = ("O4", "O5", "autocast", "bf16")

# -- modules that lose digits --------------------------------------------------------------------


def layer(function):
    return Body(lambda self, x: function(x))


def variance(x):
    """E[x^2] - E[x]^2."""
    y = x + 50
    return x / ((y * y).mean(-1, keepdim=True) - y.mean(-1, keepdim=True) ** 2).abs().add(1e-3)


def shift(x):
    return (x + 1000) - 1000


def rotary(x):
    """Rotary positions in the dtype of the activations."""
    times, width = x.shape[1:]
    frequencies = (10000 ** (-torch.arange(0, width, 2) / width)).to(x.dtype)
    angles = torch.arange(times, dtype=x.dtype)[:, None] * frequencies
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


def running_sum(x, *, inplace=False):
    total = torch.zeros_like(x[:, 0])
    for step in x.abs().unbind(1):
        if inplace:
            total += step
        else:
            total = total + step
    return x + (total / x.shape[1])[:, None]


def large_logits(x):
    return x + (x.bfloat16() * 200).softmax(-1)


def average(x):
    """An exponential moving average over the sequence."""
    last = torch.ones_like(x[:, 0])
    averages = []
    for step in x.unbind(1):
        last = 0.99 * last + 0.01 * (step + 2)
        averages.append(last)
    return x + torch.stack(averages, 1)


class Cancels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        large = 300 * grad.abs().max()
        return (grad + large) - large + grad


FAULTS = {
    "variance": (variance, 16, "aten.sub", "forward"),
    "shift": (shift, 16, "aten.sub", "forward"),
    "rotary": (rotary, 400, "aten.cos", "forward"),
    "sum": (running_sum, 300, "aten.add", "forward"),
    "sum in place": (functools.partial(running_sum, inplace=True), 300, "aten.add_", "forward"),
    "softmax": (large_logits, 16, "aten._softmax", "forward"),
    "average": (average, 30, "aten.mul aten.add", "forward"),
    "backward": (Cancels.apply, 16, "aten.sub", "backward"),
}
"""Each layer, the length of the sequence, the operators that lose digits first, the direction."""


def around(faulty, width=32):
    """A faulty layer between healthy ones."""
    before = {"embedding": nn.Embedding(65, width), "before": nn.Linear(width, width)}
    after = {"norm": nn.LayerNorm(width), "head": nn.Linear(width, 65)}
    return nn.Sequential(OrderedDict(**before, faulty=layer(faulty), **after))


# -- healthy models ------------------------------------------------------------------------------


def mlp(activation=nn.ReLU, norm=nn.Identity, depth=4):
    layers = []
    for index in range(depth):
        layers += [nn.Linear(64 if index else 32, 64), norm(64), activation()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def conv_net():
    first = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
    between = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()  # of means that are 0
    second = nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    last = nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 9, 10)
    return nn.Sequential(*first, *between, *second, *last)


class Attention(nn.Module):
    def __init__(self, width, mask):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mask, self.dropout = mask, nn.Dropout(0.1)

    def forward(self, x):
        parts = self.query, self.key, self.value
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        if self.mask == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            if self.mask == "least":
                least = torch.finfo(scores.dtype).min
                low = torch.zeros(later.shape, dtype=scores.dtype).masked_fill(later, least)
                scores = (scores + low).masked_fill(low.bool(), least)
            else:
                scores = scores.masked_fill(later, float("-inf"))
            y = self.dropout(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, mask, width=48, depth=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(65, width), nn.Embedding(64, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.attention = nn.ModuleList(Attention(width, mask) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 65)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for index, (attention, part) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * index](x))
            x = x + part(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x))


def recurrent(self, tokens):
    return self.head(self.rnn(self.embedding(tokens))[0])


def lstm():
    rnn = nn.LSTM(32, 32, batch_first=True)
    return Body(recurrent, embedding=nn.Embedding(65, 32), rnn=rnn, head=nn.Linear(32, 65))


def attends_to_edges(self, x):
    """A softmax over the edges of each node, written with scatters, as graph networks do."""
    source, target = torch.randint(len(x), (2, 4 * len(x)))
    scores = F.leaky_relu(self.key(x[source] + x[target]).squeeze(-1))
    largest = torch.full_like(scores[: len(x)], float("-inf"))
    largest = largest.scatter_reduce(0, target, scores, "amax")
    weights = (scores - largest[target]).exp()
    sums = torch.zeros_like(weights[: len(x)]).index_add(0, target, weights)
    messages = (weights / (sums[target] + 1e-6)).unsqueeze(-1) * self.value(x)[source]
    return self.head(torch.zeros_like(messages[: len(x)]).index_add(0, target, messages))


def graph_attention():
    layers = {"key": nn.Linear(32, 1), "value": nn.Linear(32, 32), "head": nn.Linear(32, 10)}
    return Body(attends_to_edges, **layers)


def refines(self, x):
    """Adds 16-bit updates to coordinates in fp32, as an optical flow does."""
    start = end = torch.linspace(1e3, 2e3, 10)
    hidden = None
    for _ in range(3):
        hidden = self.cell(x, hidden)
        end = end + self.update(hidden)
    return end - start


HEALTHY = {
    "refinement": lambda: Body(refines, cell=nn.GRUCell(32, 16), update=nn.Linear(16, 10)),
    "graph attention": graph_attention,
    "mlp": mlp,
    "mlp, tanh, layer norm": lambda: mlp(nn.Tanh, nn.LayerNorm),
    "conv net": conv_net,
    "transformer, -inf": lambda: Transformer("infinite", depth=1),
    "transformer, finfo.min": lambda: Transformer("least", depth=1),
    "transformer, fused": lambda: Transformer("fused"),
    "lstm": lstm,
}


@functools.cache
def runs(name, mode):
    """Returns whether torch itself can run a healthy model in a mode: oneDNN may lack an LSTM."""
    try:
        if (name, mode) == ("lstm", "autocast"):
            with torch.autocast("cpu", torch.bfloat16):
                nn.LSTM(4, 4)(torch.ones(2, 1, 4))
    except RuntimeError:
        return False
    return True


# -- iterations ----------------------------------------------------------------------------------


def sample(model, length=12):
    """Returns inputs and targets that fit the model."""
    first = next(m for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv2d | nn.Linear))
    if isinstance(first, nn.Embedding):
        tokens = torch.randint(65, (4, length))
        return tokens, tokens.roll(-1, 1)
    if isinstance(first, nn.Conv2d):
        return torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return torch.randn(32, 32), torch.randint(10, (32,))


def cross_entropy(output, targets):
    return F.cross_entropy(output.float().flatten(0, -2), targets.flatten())


class Training:
    """A model with its optimizer, prepared for a mode."""

    def __init__(self, model, mode, loss=cross_entropy):
        self.mode, self.loss = mode, loss
        if mode == "bf16":
            model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if mode.startswith("O"):
            scale = {"loss_scale": 128.0} if mode == "O1" else {}
            options = {"opt_level": mode, "verbosity": 0, **scale}
            model, optimizer = amp.initialize(model, optimizer, **options)
        self.model, self.optimizer = model, optimizer

    def step(self, inputs, targets):
        """Runs one iteration and returns the loss."""
        if self.mode == "bf16" and inputs.is_floating_point():
            inputs = inputs.bfloat16()
        self.optimizer.zero_grad()
        casts = torch.autocast("cpu", torch.bfloat16) if self.mode == "autocast" else nullcontext()
        with casts:
            loss = self.loss(self.model(inputs), targets)
        scaled_backward(loss, self.optimizer) if self.mode.startswith("O") else loss.backward()
        self.optimizer.step()
        return loss.detach()

    def traced(self, inputs, targets):
        """Runs one iteration under a trace of rounding, and returns that."""
        with amp.debug.trace_rounding(self.model) as trace:
            self.step(inputs, targets)
        return trace


def traced(model, x):
    with amp.debug.trace_rounding(model) as trace:
        model(x).float().sum().backward()
    return trace
