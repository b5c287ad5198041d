"""Parameters, gradients, and one of each optimizer."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex import optimizers
from apex.contrib import optimizers as contrib

SHAPES = [(3, 4), (5,), (2, 3, 2), ()]

MAKERS = {
    "FusedAdam": lambda p, **k: optimizers.FusedAdam(p, **{"lr": 0.05, "weight_decay": 0.1, **k}),
    "FusedAdam-plain": lambda p, **k: optimizers.FusedAdam(
        p, **{"lr": 0.05, "bias_correction": False, "adam_w_mode": False, "weight_decay": 0.1, **k}
    ),
    "FusedAdam-capturable": lambda p, **k: optimizers.FusedAdam(p, lr=0.05, capturable=True, **k),
    "FusedSGD": lambda p, **k: optimizers.FusedSGD(
        p, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, **k}
    ),
    "FusedSGD-dampened": lambda p, **k: optimizers.FusedSGD(
        p, lr=0.05, momentum=0.9, dampening=0.5, **k
    ),
    "FusedSGD-after": lambda p, **k: optimizers.FusedSGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.1, wd_after_momentum=True, **k
    ),
    "FusedLAMB": lambda p, **k: optimizers.FusedLAMB(p, **{"lr": 0.05, **k}),
    "FusedNovoGrad": lambda p, **k: optimizers.FusedNovoGrad(p, **{"lr": 0.05, **k}),
    "FusedNovoGrad-inside": lambda p, **k: optimizers.FusedNovoGrad(
        p, lr=0.05, weight_decay=0.1, reg_inside_moment=True, norm_type=0, init_zero=True, **k
    ),
    "FusedAdagrad": lambda p, **k: optimizers.FusedAdagrad(
        p, **{"lr": 0.05, "weight_decay": 0.1, "adagrad_w_mode": True, **k}
    ),
    "FusedMixedPrecisionLamb": lambda p, **k: optimizers.FusedMixedPrecisionLamb(p, lr=0.05, **k),
    "contrib.FusedAdam": lambda p, **k: contrib.FusedAdam(
        p, lr=0.05, weight_decay=0.1, max_grad_norm=1.0, **k
    ),
}


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype))
        for shape in shapes
    ]


def gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(p.shape, generator=generator, dtype=torch.float32).to(dtype or p.dtype)
        for p in params
    ]


def give(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def run(optimizer, params, steps, first=0):
    """Steps with the gradients of steps `first`, `first + 1`, ..."""
    for step in range(first, first + steps):
        give(params, gradients(params, step))
        optimizer.step()


def snapshot(optimizer):
    """Everything a step may change, in a form that compares bit for bit."""
    state = optimizer.state_dict()
    tensors = {
        (key, name): value.clone() if isinstance(value, torch.Tensor) else value
        for key, values in state["state"].items()
        for name, value in values.items()
    }
    steps = [int(group.get("step", 0)) for group in state["param_groups"]]
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return params, tensors, steps


def assert_same(left, right, **tolerance):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **tolerance)


class HostReads(TorchDispatchMode):
    """Counts the operator that copies a number to the host and waits for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# -- the rules as plain loops over tensors -------------------------------------------------------


class Plain:
    """Steps copies of parameters by a rule; `state` holds one dict for each."""

    def __init__(self, params, **options):
        self.params = [p.detach().clone() for p in params]
        self.state = [{} for _ in params]
        self.options = options
        self.count = 0

    def step(self, grads):
        self.count += 1
        self.before(grads)
        for p, g, state in zip(self.params, grads, self.state, strict=True):
            if g is not None:
                self.rule(p, g.to(p.dtype), state, **self.options)

    def before(self, grads):
        pass

    def average(self, state, name, decay, value, share):
        state[name] = decay * state.get(name, torch.zeros_like(value)) + share * value
        return state[name]


class Adam(Plain):
    def direction(self, p, g, state, betas, eps, weight_decay, w_mode, bias_correction, averaging):
        if not w_mode:
            g = g + weight_decay * p
        m = self.average(state, "m", betas[0], g, 1 - betas[0] if averaging else 1.0)
        v = self.average(state, "v", betas[1], g * g, 1 - betas[1])
        if bias_correction:
            m, v = m / (1 - betas[0] ** self.count), v / (1 - betas[1] ** self.count)
        update = m / (v.sqrt() + eps)
        return update + weight_decay * p if w_mode else update

    def rule(self, p, g, state, lr, **rest):
        p -= lr * self.direction(p, g, state, averaging=True, **rest)


class LAMB(Adam):
    def before(self, grads):
        norm = sum(float(g.double().square().sum()) for g in grads if g is not None) ** 0.5
        self.divisor = max(1.0, norm / self.options["max_grad_norm"])

    def rule(self, p, g, state, lr, max_grad_norm, use_nvlamb, **rest):
        update = self.direction(p, g / self.divisor, state, **rest)
        if use_nvlamb or rest["weight_decay"]:
            param_norm, update_norm = p.norm(), update.norm()
            if param_norm and update_norm:
                lr = lr * param_norm / update_norm
        p -= lr * update


class SGD(Plain):
    def stored(self, momentum):
        return momentum.clone()

    def rule(self, p, g, state, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum):
        if not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            old = state.get("buffer")
            new = g if old is None else momentum * old + (1 - dampening) * g
            state["buffer"] = self.stored(new)
            g = g + momentum * state["buffer"] if nesterov else state["buffer"]
        if wd_after_momentum:
            g = g + weight_decay * p
        p -= lr * g


class Adagrad(Plain):
    def rule(self, p, g, state, lr, eps, weight_decay, w_mode):
        if not w_mode:
            g = g + weight_decay * p
        h = self.average(state, "sum", 1.0, g * g, 1.0)
        update = g / (h.sqrt() + eps)
        p -= lr * (update + weight_decay * p if w_mode else update)


class NovoGrad(Plain):
    def norm(self, g, state, beta2, norm_type, init_zero):
        fresh = g.abs().max() if norm_type == 0 else g.norm()
        old = state.get("norm", torch.zeros(()) if init_zero else fresh)
        if norm_type == 0:
            state["norm"] = beta2 * old + (1 - beta2) * fresh
        else:
            state["norm"] = (beta2 * old**2 + (1 - beta2) * fresh**2).sqrt()
        return state["norm"]

    def rule(
        self, p, g, state, lr, betas, eps, weight_decay, bias_correction, averaging, inside,
        norm_type, init_zero,
    ):  # fmt: skip
        norm = self.norm(g, state, betas[1], norm_type, init_zero)
        first = 1 - betas[0] ** self.count if bias_correction else 1.0
        second = (1 - betas[1] ** self.count) ** 0.5 if bias_correction else 1.0
        denominator = norm / second + eps
        share = 1 - betas[0] if averaging else 1.0
        if inside:
            g = g / denominator + weight_decay * p
            p -= lr * self.average(state, "m", betas[0], g, share) / first
        else:
            m = self.average(state, "m", betas[0], g, share) / first
            p -= lr * (m / denominator + weight_decay * p)


class LegacyAdam(Plain):
    """Adam with the bias corrected in the step size."""

    def rule(self, p, g, state, lr, betas, eps, inside, weight_decay, bias_correction):
        m = self.average(state, "m", betas[0], g, 1 - betas[0])
        v = self.average(state, "v", betas[1], g * g, 1 - betas[1])
        if bias_correction:
            lr = lr * (1 - betas[1] ** self.count) ** 0.5 / (1 - betas[0] ** self.count)
        denominator = (v + eps).sqrt() if inside else v.sqrt() + eps
        p -= lr * (m / denominator + weight_decay * p)
