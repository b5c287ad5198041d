"""What training by hand gives, in plain torch: weights, sums of gradients, and who wrote last."""

import copy
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def recording(model, raw):
    """Puts the gradient of every parameter that a backward pass reaches into the dict ``raw``."""
    handles = [
        param.register_hook(lambda grad, name=name: raw.update({name: grad.detach().clone()}))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Shadow:
    """Expected values by parameter name.

    Attributes:
        weights: What optimizers step, in its own dtype: fp32 where there is a master.
        sums: The gradients that optimizers step by; ``None`` where there are none.
        scaled: Sums of gradients that delayed passes have left scaled, in the model's dtype.
        written: Values that were written into the model since the last pass or step.
        unseen: Names whose masters were written since the model was last used.
    """

    def __init__(self, weights):
        self.weights = weights
        self.sums = dict.fromkeys(weights)
        self.scaled, self.written, self.unseen = {}, {}, set()

    # -- gradients ---------------------------------------------------------------------------

    def add_in_place(self, raw, names):
        """Adds gradients as plain autograd does."""
        for name in names & raw.keys():
            total = self.sums[name]
            self.sums[name] = raw[name] if total is None else total + raw[name]

    def add_scaled(self, raw):
        for name, grad in raw.items():
            self.scaled[name] = self.scaled[name] + grad if name in self.scaled else grad

    def unscale(self, scale):
        """Adds what passes have left scaled; returns whether any of it is infinite or NaN."""
        overflow = False
        for name, grad in self.scaled.items():
            fresh = grad.to(self.weights[name].dtype) * (1 / scale)
            total = self.sums[name]
            self.sums[name] = fresh if total is None else fresh + total
            overflow |= not fresh.isfinite().all()
        self.scaled = {}
        return bool(overflow)

    def zero(self, names, *, set_to_none):
        for name in names:
            total = self.sums[name]
            self.sums[name] = None if set_to_none or total is None else torch.zeros_like(total)

    def empty(self, names):
        return all(self.sums[name] is None for name in names)

    def poisoned(self, names):
        sums = [self.sums[name] for name in names]
        return not all(total is None or total.isfinite().all() for total in sums)

    # -- weights -----------------------------------------------------------------------------

    def merged(self, name):
        """Returns the weight with what was written into the model, where that differs from it."""
        weight = self.weights[name]
        if name not in self.written:
            return weight
        low = self.written[name]
        return torch.where(weight.to(low.dtype) == low, weight, low.to(weight.dtype))

    def take(self, names):
        """A pass or a step begins: what was written into the model goes to the masters."""
        for name in names:
            if name not in self.unseen:
                self.weights[name] = self.merged(name)
                self.written.pop(name, None)

    def show(self, names):
        """The model is used: it shows what was written into masters, which wins."""
        for name in self.unseen & set(names):
            self.unseen.remove(name)
            self.written.pop(name, None)

    def adopt(self, stepped):
        """Parameters that were unfrozen have got a master."""
        for name, param in stepped.items():
            self.weights[name] = self.weights[name].to(param.dtype)

    def write_both(self, name, value):
        self.weights[name] = value.to(self.weights[name].dtype)
        self.written.pop(name, None)
        self.unseen.discard(name)

    def step(self, make, optimizer, stepped):
        """Steps by a plain optimizer that has the state of ``optimizer``."""
        clones = {name: nn.Parameter(self.weights[name].clone()) for name in stepped}
        plain = make(list(clones.values()))
        for name, param in stepped.items():
            clone, total = clones[name], self.sums[name]
            clone.grad = None if total is None else total.clone()
            if param in optimizer.state:
                plain.state[clone] = copy.deepcopy(optimizer.state[param])
        plain.step()
        self.weights.update({name: clone.detach() for name, clone in clones.items()})
