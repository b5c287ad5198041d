"""Parameters, gradients, and one of each optimizer."""

import torch

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
        param.grad = grad.clone()


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
