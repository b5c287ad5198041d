"""Models and plans that the conversion tests share."""

import contextlib

import torch
from torch import nn

from apex._engine.model import ModelPlan, convert

torch.set_num_threads(1)

LOW = torch.bfloat16
O0 = ModelPlan(torch.float32, torch.float32, None)
O1 = ModelPlan(None, None, None)
O3 = ModelPlan(LOW, LOW, torch.float32)
O5 = ModelPlan(LOW, LOW, torch.float32, keep_batchnorm_fp32=True)


class PlainRegion:
    """Calls the function, and counts."""

    def __init__(self):
        self.calls = 0

    def run(self, fn, /, *args, **kwargs):
        self.calls += 1
        return fn(*args, **kwargs)

    run_eagerly = run


class Masters:
    """Fp32 values that differ from the parameters by less than half a rounding step."""

    def __init__(self, model):
        self.by_id = {
            id(p): p.detach().float() * (1 + 2.0**-12) for p in model.parameters() if p.dtype is LOW
        }

        self.written_back = 0

    def master_of(self, param):
        return self.by_id.get(id(param))

    def masters_of(self, params):
        return [self.master_of(param) for param in params]

    def write_back(self):
        self.written_back += 1

    def write_back_before_each_run(self):
        pass

    def note_copy(self, *models):
        pass

    @torch.no_grad()
    def set_exact(self, values):
        for param, value in values:
            self.by_id[id(param)].copy_(value)

    def runs_under(self, wrapper, *, traced=False):
        self.wrapper = wrapper

    def cast_gradients(self):
        return contextlib.nullcontext()

    def clear_grads(self, params, *, set_to_none):
        self.cleared = ([id(p) for p in params], set_to_none)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("shift", torch.full((2,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, scale=None):
        """Docs of the model."""
        y = self.last(self.norm(self.first(x)).relu()) + self.shift
        return y if scale is None else y * scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


class Echo(nn.Module):
    """Returns what it was given, and keeps it to look at."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return args[0] if args else None


def converted(model, plan=O5, region=None, **kwargs):
    convert(model, plan, region or PlainRegion(), **kwargs)
    return model


def with_masters(model, plan=O5):
    convert(model, plan, PlainRegion())
    masters = Masters(model)
    model.__dict__["_apex_state"].link._masters = masters
    return model, masters


def x(rows=4):
    return torch.linspace(-1, 1, rows * 3).view(rows, 3)


def dtypes_of(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.dtype for name, tensor in tensors}
