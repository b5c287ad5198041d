"""Parameters, gradients, and one of each of apex's optimizers."""

from functools import partial

import torch

from apex import optimizers
from apex.contrib import optimizers as contrib

SHAPES = [(3, 4), (5,), (2, 3, 2), ()]

MAKERS = {
    "FusedAdam": partial(optimizers.FusedAdam, lr=0.05, weight_decay=0.1),
    "FusedAdam-plain": partial(
        optimizers.FusedAdam, lr=0.05, bias_correction=False, adam_w_mode=False, weight_decay=0.1
    ),
    "FusedAdam-capturable": partial(optimizers.FusedAdam, lr=0.05, capturable=True),
    "FusedSGD": partial(optimizers.FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "FusedSGD-dampened": partial(optimizers.FusedSGD, lr=0.05, momentum=0.9, dampening=0.5),
    "FusedSGD-after": partial(
        optimizers.FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1, wd_after_momentum=True
    ),
    "FusedLAMB": partial(optimizers.FusedLAMB, lr=0.05),
    "FusedNovoGrad": partial(optimizers.FusedNovoGrad, lr=0.05),
    "FusedNovoGrad-inside": partial(
        optimizers.FusedNovoGrad, lr=0.05, weight_decay=0.1, reg_inside_moment=True, norm_type=0,
        init_zero=True,
    ),
    "FusedAdagrad": partial(
        optimizers.FusedAdagrad, lr=0.05, weight_decay=0.1, adagrad_w_mode=True
    ),
    "FusedMixedPrecisionLamb": partial(optimizers.FusedMixedPrecisionLamb, lr=0.05),
    "contrib.FusedAdam": partial(contrib.FusedAdam, lr=0.05, weight_decay=0.1, max_grad_norm=1.0),
}  # fmt: skip


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


def stepped(make_optimizer, steps=3):
    """Returns parameters after some steps of an optimizer made for them."""
    params = parameters()
    run(make_optimizer(params), params, steps)
    return params
