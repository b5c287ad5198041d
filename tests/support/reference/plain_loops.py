"""Mixed-precision training written out by hand: explicit casts, masters and loss scale; no apex.

A loop trains ``linear, relu, linear`` on a mean squared error. Nothing in it is fast.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Level:
    """What a level of mixed precision does.

    Attributes:
        compute: Type of the linear layers.
        stored: Type of the model's parameters.
        masters: Whether the optimizer steps fp32 copies of them.
        scale: Loss scale; "dynamic" follows the gradients.
    """

    compute: torch.dtype
    stored: torch.dtype
    masters: bool
    scale: float | str


_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16

LEVELS = {
    "O0": Level(_FP32, _FP32, masters=False, scale=1.0),
    "O1": Level(_FP16, _FP32, masters=False, scale="dynamic"),
    "O2": Level(_FP16, _FP16, masters=True, scale="dynamic"),
    "O3": Level(_FP16, _FP16, masters=False, scale=1.0),
    "O4": Level(_BF16, _FP32, masters=False, scale=1.0),
    "O5": Level(_BF16, _BF16, masters=True, scale=1.0),
}


def next_scale(scale, growth_tracker, *, overflow, interval, greatest):
    """Halves on overflow; doubles after ``interval`` clean steps, up to ``greatest``: apex's
    rule, with a floor of its own under it.
    """
    if overflow:
        return max(scale / 2, SMALLEST_SCALE), 0
    growth_tracker += 1
    if growth_tracker == interval:
        return min(scale * 2, greatest), 0
    return scale, growth_tracker


class Loop:
    """One training by hand.

    Attributes:
        model: The four parameters that the forward pass uses.
        stepped: The four that the optimizer steps; the same ones without masters.
        scales: The loss scale after every backward pass.
    """

    def __init__(
        self, level, weights, make_optimizer, *, scale=None, interval=2000, greatest=2.0**24,
        trains=slice(None),
    ):  # fmt: skip
        self.level = LEVELS[level]
        self.interval, self.greatest = interval, greatest
        weights = list(weights)
        copies = (weight.detach().clone().to(self.level.stored) for weight in weights)
        self.model = [*map(torch.nn.Parameter, copies)]
        self.stepped = self.model
        if self.level.masters:
            self.stepped = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
        self.optimizer = make_optimizer(self.stepped[trains])
        scale = self.level.scale if scale is None else scale
        self.dynamic = scale == "dynamic"
        self.scale = 2.0**16 if self.dynamic else scale
        self.growth_tracker = 0
        self.overflow = self.delayed = False
        self.scaled = [None] * len(self.model)
        self.scales = []

    def forward(self, x):
        compute = self.level.compute
        w1, b1, w2, b2 = (param.to(compute) for param in self.model)
        hidden = F.relu(F.linear(x.to(compute), w1, b1))
        return F.linear(hidden, w2, b2)

    def zero_grad(self):
        for param in (*self.model, *self.stepped):
            param.grad = None

    def backward(self, x, y, *, delay_unscale=False):
        """Adds a pass to the true gradients of ``stepped``.

        Delayed passes add up scaled, in the type of ``stepped``.
        """
        kept = [None if self.delayed else stepped.grad for stepped in self.stepped]
        earlier = self.scaled if self.delayed else [None] * len(self.model)
        for param in self.model:
            param.grad = None
        loss = F.mse_loss(self.forward(x).float(), y)
        (loss * self.scale).backward()
        self.scaled = [
            param.grad if sum_ is None else sum_.to(stepped.dtype) + param.grad
            for param, stepped, sum_ in zip(self.model, self.stepped, earlier, strict=True)
        ]
        self.delayed = delay_unscale
        if not delay_unscale:
            self.unscale(kept)
        return loss.detach()

    def unscale(self, kept):
        overflow = False
        for scaled, stepped, earlier in zip(self.scaled, self.stepped, kept, strict=True):
            if scaled is None:
                continue
            grad = (scaled.float() / self.scale).to(stepped.dtype)
            overflow |= not bool(torch.isfinite(grad).all())
            stepped.grad = grad if earlier is None else earlier + grad
        overflow = overflow and self.dynamic
        self.overflow |= overflow
        self.end_pass(overflow)

    def end_pass(self, overflow):
        if self.dynamic:
            self.scale, self.growth_tracker = next_scale(
                self.scale, self.growth_tracker, overflow=overflow, interval=self.interval,
                greatest=self.greatest,
            )  # fmt: skip
        else:
            self.growth_tracker += 1
        self.scales.append(self.scale)

    def step(self):
        """Steps, but after an overflow, once; the masters' gradients end with it."""
        if not self.overflow:
            self.optimizer.step()
            self.round_to_model()
        self.overflow = False
        if self.level.masters:
            for stepped in self.stepped:
                stepped.grad = None

    def train_step(self, x, y):
        self.zero_grad()
        loss = self.backward(x, y)
        self.step()
        return loss

    def train_step_with_closure(self, x, y):
        losses = []

        def closure():
            self.round_to_model()
            self.zero_grad()
            losses.append(self.backward(x, y))
            return losses[-1]

        self.optimizer.step(closure)
        self.round_to_model()
        return losses[0]

    def round_to_model(self):
        if self.level.masters:
            with torch.no_grad():
                for param, master in zip(self.model, self.stepped, strict=True):
                    param.copy_(master)
