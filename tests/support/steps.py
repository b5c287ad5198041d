"""A small model, its optimizer and its data, and what a user would do with them."""

import gc
from contextlib import contextmanager

import torch
from torch import nn

import apex.amp as amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
LOW = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16} | {
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
DYNAMIC = ("O1", "O2")


class Net(nn.Module):
    """Batch norm between two linear layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.125, **kwargs)


def prepared(level, *, optimizer=sgd, **kwargs):
    """Returns a fresh ``Net`` and its optimizer, prepared at ``level`` without a word."""
    model = Net()
    kwargs = {"verbosity": 0, **kwargs}
    return amp.initialize(model, optimizer(model), opt_level=level, **kwargs)


def one_weight(level, value=1.0, **kwargs):
    """Returns a model with the one weight ``value``, whose output is weight times input."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    kwargs = {"verbosity": 0, **kwargs}
    return amp.initialize(model, sgd(model), opt_level=level, **kwargs)


def slope(model, value):
    """Returns a loss whose gradient by each element of the weight is ``value``."""
    return value * model.weight.float().sum()


def loss_of(model):
    x = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
    return model(x).float().pow(2).mean()


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled_loss:
        scaled_loss.backward()


def train(model, optimizer, steps=3):
    """Returns the losses of ``steps`` full iterations."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def overflow(model, optimizer, **kwargs):
    """One backward pass with a gradient that is inf."""
    backward((model.last.weight * torch.inf).sum(), optimizer, **kwargs)


def scale(index=0):
    return amp.state_dict()[f"loss_scaler{index}"]["loss_scale"]


def unskipped(index=0):
    return amp.state_dict()[f"loss_scaler{index}"]["unskipped"]


def live_sessions():
    gc.collect()
    return len(amp._amp_state.sessions())


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
