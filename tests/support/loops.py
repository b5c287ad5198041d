"""Small nets, their data, optimizers, and training as a user writes it."""

import gc
import io
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex
from apex import amp
from benchmarks.loops import Task, fused_adamw
from tests.support.reference.plain_loops import LEVELS as LEVELS

SOURCES = str(Path(apex.__file__).parent)
MIXED = ("O1", "O2", "O4", "O5")
DYNAMIC = ("O1", "O2")
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


def each_of(*values, ids=None):
    """An argument of a module's tests: each that takes it runs with all values."""
    return pytest.fixture(params=values, ids=ids)(lambda request: request.param)


def every(**arguments):
    """Runs a test with every combination of the values of these arguments."""

    def parametrized(test):
        for name, values in reversed(arguments.items()):
            test = pytest.mark.parametrize(name, values)(test)
        return test

    return parametrized


def at_levels(*names):
    """The ``level`` of a module: its tests run at these, where they do not say others."""
    return each_of(*names)


def fused_adamw_of(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def sgd(params, lr=0.1, **options):
    return torch.optim.SGD(params, lr=lr, **options)


class Net(nn.Module):
    """Batch norm between two linear layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Body(nn.Module):
    """A module of named parts; its forward is a function of it and of the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class InBackward(torch.autograd.Function):
    """Gives what it gets, and as the gradient what ``rule`` makes of the one that arrives."""

    @staticmethod
    def forward(ctx, x, rule):
        ctx.rule = rule
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.rule(grad), None


class Recomputed(torch.autograd.Function):
    """Runs ``block`` again in the backward pass, as many programs' own checkpoints do."""

    @staticmethod
    def forward(ctx, block, own_pass, x, *params):
        ctx.block, ctx.own_pass, ctx.inputs = block, own_pass, (x, *params)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.inputs[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        if ctx.own_pass:
            out.backward(grad)
            return None, None, x.grad, *[None] * len(ctx.inputs[1:])
        return None, None, *torch.autograd.grad(out, (x, *ctx.inputs[1:]), grad)


def conv_net():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        )


class Weights(nn.Module):
    """Some weights; the gradient of each is its factor in the loss."""

    def __init__(self, names="ab"):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))

    def forward(self, **factors):
        return sum((getattr(self, name).float() * k).sum() for name, k in factors.items())


def net(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def plain_pair(make_optimizer=sgd):
    """A model and its optimizer as a script makes them, before amp prepares them."""
    model = net()
    return model, make_optimizer(model.parameters())


def prepared(level, make_optimizer=sgd, model=None, **options):
    """A model (by default ``net()``) and its optimizer, through ``amp.initialize``."""
    model = net() if model is None else model
    optimizer = make_optimizer(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def one_weight(level, **options):
    """A prepared model with one weight of 1.0, whose output is weight times input."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return prepared(level, lambda params: sgd(params, lr=0.125), model, **options)


def two_optimizers(level, names="ab", **options):
    """Weights of which each of the first two has an optimizer of its own, prepared."""
    model = Weights(names)
    optimizers = [sgd([model.a]), sgd([model.b])]
    return amp.initialize(model, optimizers, opt_level=level, **{"verbosity": 0, **options})


def slope(model, value):
    """A loss whose gradient by each element of the weight is ``value``."""
    return value * model.weight.float().sum()


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


def small_batches(count=1):
    """One batch, ``count`` times; its gradients fit fp16 at a loss scale of 65536."""
    x = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
    return [(x, torch.zeros(8, 2))] * count


def loss_of(model, x, y):
    return F.mse_loss(model(x).float(), y)


def small_loss(model):
    return loss_of(model, *small_batches()[0])


def scaled_backward(loss, optimizers, **options):
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def descend(loss, *optimizers, **options):
    """Clears the gradients, runs a pass, and steps."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaled_backward(loss, [*optimizers], **options)
    for optimizer in optimizers:
        optimizer.step()


def backward(model, optimizer, x, y, **options):
    loss = loss_of(model, x, y)
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:  # a call is another graph
        scaled_loss.backward()
    return loss.detach()


def overflow(model, optimizer, **options):
    """One backward pass with a gradient that is inf, without a forward pass."""
    *_, last = model.parameters()
    scaled_backward((last * torch.inf).sum(), optimizer, **options)


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = backward(model, optimizer, x, y)
    optimizer.step()
    return loss


def plain_step(model, optimizer, x, y):
    """An iteration without amp."""
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_step_with_closure(model, optimizer, x, y):
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(backward(model, optimizer, x, y))
        return losses[-1]

    optimizer.step(closure)
    return losses[0]


def train(model, optimizer, steps=3, *, seed=1, data=None):
    """Returns the losses of whole iterations on ``data``, or else on ``batches(steps)``."""
    data = batches(steps, seed=seed) if data is None else data
    return [train_step(model, optimizer, x, y).item() for x, y in data]


def trained(level, make_optimizer=sgd, model=None, *, steps=2, **options):
    """What ``prepared`` returns, trained."""
    pair = prepared(level, make_optimizer, model, **options)
    train(*pair, steps)
    return pair


def stepper(owner, optimizer_name):
    """The way to step that the optimizer's name asks for, of a module or of a reference loop."""
    suffix = "_with_closure" if optimizer_name.endswith("closure") else ""
    return getattr(owner, f"train_step{suffix}")


def values(params):
    return [param.detach().clone() for param in params]


def masters(optimizer):
    return values(amp.master_params(optimizer))


def agree(model, optimizer):
    """Whether every weight of the model is its rounded master."""
    pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
    return all(torch.equal(param, master.to(param.dtype)) for param, master in pairs)


def grads(params):
    return [None if param.grad is None else param.grad.clone() for param in params]


def loss_scale(loss_id=0):
    """The scale of the newest session (an older one may live on in the traceback of a failure)."""
    return amp._amp_state.loss_scalers[loss_id].loss_scale()


def scale(index=0):
    """The scale of a loss of the newest session."""
    return amp.state_dict()[f"loss_scaler{index}"]["loss_scale"]


def unskipped(index=0):
    return amp.state_dict()[f"loss_scaler{index}"]["unskipped"]


def live_sessions():
    gc.collect()
    return len(amp._amp_state.sessions())


def saved_and_loaded(item, *, weights_only=False):
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def product():
    """The dtype of a product of fp32 tensors, which says what this thread casts to."""
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def messages(caplog):
    """What amp has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "apex"]


def in_a_thread(call):
    """What ``call`` returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def in_two_threads(work):
    """Runs ``work(0)`` and ``work(1)`` at once."""
    start = threading.Barrier(2)

    def run(index):
        start.wait()
        work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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


@contextmanager
def nothing_changes(*objects):
    """Fails unless models, optimizers and amp are after the block as before it."""
    before = [_facts(each) for each in objects], _amp_facts()
    yield
    after = [_facts(each) for each in objects], _amp_facts()
    assert after == before


def _amp_facts():
    state = amp._amp_state
    return (
        amp.state_dict(),
        state.initialized,
        len(state.sessions()),
        torch.is_autocast_enabled("cpu"),
    )


def _facts(each):
    each = getattr(each, "optim", each)
    if isinstance(each, torch.optim.Optimizer):
        tensors = [p for group in each.param_groups for p in group["params"]]
    elif isinstance(each, nn.Module):
        tensors = [*each.parameters(), *each.buffers()]
    else:
        return repr(each)
    hooks = [len(v) for k, v in vars(each).items() if k.endswith("_hooks")]
    return type(each), sorted(vars(each)), hooks, [(id(t), t.dtype, _bits(t)) for t in tensors]


def _bits(tensor):
    if tensor.is_meta or isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return None
    return tensor.detach().double().tolist()
