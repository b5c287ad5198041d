"""``master_weights="split"`` and ``"stochastic"``: fp32 masters of a bf16 model in fewer bytes."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB
from tests.training import cases

PACKED = ("split", "stochastic")
OPTIMIZERS = {
    **cases.OPTIMIZERS,
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused Adam amsgrad": lambda params: torch.optim.Adam(
        params, lr=1e-2, fused=True, amsgrad=True, weight_decay=0.1, maximize=True
    ),
    "fused Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "foreach SGD": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
}


def half_up(value):
    """``value`` rounded to bf16 with halves away from zero."""
    pattern = value.detach().contiguous().view(torch.int32)
    return ((pattern.long() + 2**15) >> 16).to(torch.int16).view(torch.bfloat16)


class Plain:
    """Training by hand: a bf16 model, rounded half up, of plain fp32 masters."""

    def __init__(self, weights, make_optimizer):
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
        self.model = [nn.Parameter(half_up(weight)) for weight in self.masters]
        self.optimizer = make_optimizer(self.masters)

    def evaluate(self, x, y):
        for param, master in zip(self.model, self.masters, strict=True):
            param.grad, param.data = None, half_up(master)
        w1, b1, w2, b2 = self.model
        loss = F.mse_loss(F.linear(F.relu(F.linear(x.bfloat16(), w1, b1)), w2, b2).float(), y)
        loss.backward()
        for param, master in zip(self.model, self.masters, strict=True):
            master.grad = param.grad.float()
        return loss.detach()

    def train_step(self, x, y):
        self.evaluate(x, y)
        self.optimizer.step()

    def train_step_with_closure(self, x, y):
        self.optimizer.step(lambda: self.evaluate(x, y))


def prepared(kind, name="fused AdamW", model=None, **options):
    return cases.prepared("O5", OPTIMIZERS[name], model, master_weights=kind, **options)


def train(model, optimizer, batches):
    for x, y in batches:
        cases.train_step(model, optimizer, x, y)


def state(model, optimizer):
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        copy.deepcopy(optimizer.state_dict()),
        amp.state_dict(),
    ]


# -- split masters are fp32 masters ------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_masters_equal_plain_ones_bit_by_bit(name):
    model, optimizer = prepared("split", name)
    plain = Plain(cases.net().parameters(), OPTIMIZERS[name])
    for x, y in cases.batches(8):
        cases.stepper(cases, name)(model, optimizer, x, y)
        cases.stepper(plain, name)(x, y)
    assert cases.same(cases.masters(optimizer), cases.values(plain.masters))
    rounded = list(map(half_up, plain.masters))
    assert cases.same(cases.values(model.parameters()), rounded)
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}


def test_a_thousand_steps_are_bit_equal():
    model, optimizer = prepared("split")
    plain = Plain(cases.net().parameters(), OPTIMIZERS["fused AdamW"])
    for x, y in cases.batches(1000):
        cases.train_step(model, optimizer, x, y)
        plain.train_step(x, y)
    assert cases.same(cases.masters(optimizer), cases.values(plain.masters))


def live_bytes():
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.data_ptr():
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("kind", "expected"), [("split", 12), ("stochastic", 10), (True, 14)])
def test_stored_bytes_per_parameter(kind, expected):
    before = live_bytes()
    model, optimizer = prepared(kind, model=nn.Linear(200, 100, bias=False))
    for _ in range(2):
        with amp.scale_loss(model(torch.randn(2, 200)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss
        optimizer.step()
        optimizer.zero_grad()
    per_param = (live_bytes() - before) / model.weight.numel()
    assert expected <= per_param < expected + 0.01
