"""A tiny net, its data, optimizers, and one step as a user writes it."""

import io
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import apex
from apex import amp
from benchmarks.loops import Task, fused_adamw
from tests.support.reference.loops import LEVELS as LEVELS

SOURCES = str(Path(apex.__file__).parent)
MIXED = ("O1", "O2", "O4", "O5")
WITH_MASTERS = ("O2", "O5")
LEVELS_SHORT = ("O1", "O2", "O5")

OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
    "fused SGD": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, dampening=0.1, fused=True
    ),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "LBFGS closure": lambda params: torch.optim.LBFGS(params, lr=0.3, max_iter=3),
    "SGD closure": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def fused_adamw_of(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def sgd(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr)


def net(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def prepared(level, make_optimizer=sgd, model=None, **options):
    """A model (by default ``net()``) and its optimizer, through ``amp.initialize``."""
    model = net() if model is None else model
    optimizer = make_optimizer(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def batches(count, overflow_at=(), seed=1):
    """``count`` pairs of inputs and targets; inputs of the steps in ``overflow_at`` hold inf."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        x = torch.randn(3, 4, generator=generator)
        y = torch.randn(3, 2, generator=generator)
        if step in overflow_at:
            x[0, 0] = float("inf")
        yield x, y


def batch(seed=1):
    return next(batches(1, seed=seed))


def overflowing(seed=1):
    return next(batches(1, overflow_at={0}, seed=seed))


def loss_of(model, x, y):
    return F.mse_loss(model(x).float(), y)


def backward(model, optimizer, x, y, **options):
    loss = loss_of(model, x, y)
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
    return loss.detach()


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = backward(model, optimizer, x, y)
    optimizer.step()
    return loss


def train_step_with_closure(model, optimizer, x, y):
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(backward(model, optimizer, x, y))
        return losses[-1]

    optimizer.step(closure)
    return losses[0]


def stepper(owner, optimizer_name):
    """The way to step that the optimizer's name asks for, of a module or of a reference loop."""
    suffix = "_with_closure" if optimizer_name.endswith("closure") else ""
    return getattr(owner, f"train_step{suffix}")


def values(params):
    return [param.detach().clone() for param in params]


def masters(optimizer):
    return values(amp.master_params(optimizer))


def grads(params):
    return [None if param.grad is None else param.grad.clone() for param in params]


def loss_scale(loss_id=0):
    """The scale of the newest session (an older one may live on in the traceback of a failure)."""
    return amp._amp_state.loss_scalers[loss_id].loss_scale()


def saved_and_loaded(item):
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def change(params, values, by):
    """Writes parameters in a way that torch counts (``"data"``: assigned, ``"copy_"``) or not."""
    for param, value in zip(params, values, strict=True):
        if by == "data":
            param.data = value.clone()
        elif by == "data.copy_":
            param.data.copy_(value)
        else:
            with torch.no_grad():
                param.copy_(value)


def same(first, second):
    """Whether two nestings hold bit-identical values; NaNs of one place count as equal."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype is second.dtype
            and first.shape == second.shape
            and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def large_task():
    """Three million parameters, and little else: where a step's memory is theirs."""
    return Task(
        lambda: nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)]),
        lambda: (torch.randn(1, 1024), torch.zeros(1, dtype=torch.long)),
        fused_adamw,
    )
