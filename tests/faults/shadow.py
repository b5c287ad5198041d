"""What training by hand gives, in plain torch: weights, sums of gradients, and who wrote last."""

import copy
from contextlib import contextmanager

import torch
from torch import nn

from apex._engine.optimizer import deferred
from apex._torch import parameters


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


def peek(param):
    """Returns a gradient; one that is deferred stays so."""
    waiting = deferred.of(param)
    if waiting is None:
        return param.grad
    value = waiting.values.detach().float()
    for factor in waiting.factors:
        value = value * factor
    added = parameters.grad_of(param)
    return value if added is None else value + added


class Shadow:
    """Expected values by parameter name.

    Attributes:
        low: The dtypes of the model's parameters.
        weights: What optimizers step, in its own dtype: fp32 where there is a master.
        sums: The gradients that optimizers step by; ``None`` where there are none.
        scaled: Sums of gradients that delayed passes have left scaled, in the model's dtype.
        written: Values that were written into the model since the last step.
        earlier: Weights from before they followed what was written, until the next step.
        unseen: Names whose masters were written since the model was last used.
    """

    def __init__(self, low, weights):
        self.low = low
        self.weights = weights
        self.sums = dict.fromkeys(weights)
        self.scaled, self.written, self.earlier = {}, {}, {}
        self.unseen = set()

    def has_master(self, name):
        return self.low[name] is not self.weights[name].dtype

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

    def clip(self, names, norm, max_norm):
        """Checks the norm, and scales by it."""
        sums = [total for name in names if (total := self.sums[name]) is not None]
        own = torch.cat([total.flatten().float() for total in sums] or [torch.zeros(1)]).norm()
        assert torch.allclose(norm, own, rtol=1e-5, equal_nan=True)
        self.multiply(names, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def multiply(self, names, factor):
        for name in names:
            total = self.sums[name]
            if total is not None:
                self.sums[name] = total * factor.to(total.dtype)

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

    def shown(self, name):
        return self.weights[name].to(self.low[name])

    def shown_before(self, name):
        """Returns what the model showed before its weight was written."""
        return self.earlier.get(name, self.weights[name]).to(self.low[name])

    def merged(self, name):
        """Returns the weight with what was written into the model, where that differs from it."""
        weight = self.weights[name]
        if name not in self.written:
            return weight
        low = self.written[name]
        merged = low.to(weight.dtype)
        for known in (weight, self.earlier.get(name, weight)):
            merged = torch.where(known.to(self.low[name]) == low, known, merged)
        return merged

    def take(self, names, *, steps=False):
        """What was written into the model goes to the masters; before a step, for now."""
        for name in set(names) & self.written.keys() - self.unseen:
            if steps:
                self.weights[name] = self.merged(name)
                self.forget_write(name)
            else:
                merged = self.merged(name)
                self.earlier.setdefault(name, self.weights[name])
                self.weights[name] = merged

    def forget_write(self, name):
        self.written.pop(name, None)
        self.earlier.pop(name, None)

    def show(self, names):
        """The model is used: it shows what was written into masters, which wins."""
        for name in self.unseen & set(names):
            self.unseen.remove(name)
            self.forget_write(name)

    def adopt(self, stepped):
        """Parameters that were unfrozen have got a master."""
        for name, param in stepped.items():
            if self.weights[name].dtype is not param.dtype:
                self.weights[name] = self.weights[name].to(param.dtype)

    def write_both(self, name, value):
        self.weights[name] = value.to(self.weights[name].dtype)
        self.forget_write(name)
        self.unseen.discard(name)

    def write_master(self, name, value):
        self.weights[name] = value.clone()
        if self.has_master(name):
            self.unseen.add(name)

    def write_model(self, name, value):
        """The model's weight gets a value."""
        if not self.has_master(name):
            self.weights[name] = value.clone()
            return
        self.written[name] = value.clone()

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
