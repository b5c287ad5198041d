"""float64 arguments stay float64 at a model's door, and still meet fp32 weights."""

import dataclasses
from collections import UserDict, deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.support.loops import Body, at_levels

level = at_levels("O1", "O4")
low = pytest.fixture(lambda level: torch.float16 if level == "O1" else torch.bfloat16)
FP32, FP64 = torch.float32, torch.float64


def applied(layer, x):
    return layer(x)


def make_model(level, layer=None, rule=applied):
    """A prepared model that calls ``rule(layer, x)``."""
    layer = layer or nn.Linear(4, 4)
    model = Body(lambda self, x, **more: rule(self.layer, x, **more), layer=layer)
    return amp.initialize(model, opt_level=level, verbosity=0)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: {"x": x}, lambda x: [(x,)]])
def test_seconds_since_1970_keep_their_differences(level, low, make):
    start = torch.full((2, 1), 1.7e9, dtype=FP64)
    found = []

    def elapsed(layer, x, other):
        leaf = x
        while not isinstance(leaf, torch.Tensor):
            leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
        found.append(leaf - other)
        return layer(found[0].float())

    model = make_model(level, nn.Linear(1, 4), elapsed)
    assert model(make(start + 3), other=start).dtype is low
    assert torch.equal(found[0], torch.full((2, 1), 3.0, dtype=FP64))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


PACKED = [
    (Batch, lambda batch: batch.x),
    (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    (lambda x: deque([x]), lambda batch: batch[0]),
]


@pytest.mark.parametrize(("pack", "unpack"), PACKED)
def test_float64_in_any_container_meets_fp32_weights(level, low, pack, unpack):
    model = make_model(level, nn.Linear(4, 4), lambda layer, batch: layer(unpack(batch)))
    assert model(pack(torch.ones(2, 4, dtype=FP64))).dtype is low


MEETS_WEIGHTS = {
    "linear": (nn.Linear(4, 4), (2, 4), applied),
    "conv": (nn.Conv1d(4, 4, 3), (2, 4, 8), applied),
    "transposed conv": (nn.ConvTranspose1d(4, 4, 3), (2, 4, 8), applied),
    "layer norm": (nn.LayerNorm(4), (2, 4), applied),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 3), applied),
    "prelu": (nn.PReLU(), (2, 4), applied),
    "lstm": (nn.LSTM(4, 4), (2, 3, 4), lambda layer, x: layer(x)[0]),
    "gru cell": (nn.GRUCell(4, 4), (2, 4), applied),
    "attention": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (2, 3, 4), applied),
    "product": (nn.Linear(4, 4), (2, 4), lambda layer, x: x @ layer.weight + layer.bias),
    "loss": (nn.Linear(4, 4), (2, 4), lambda layer, x: F.mse_loss(layer(x.float()), x)),
}


@pytest.mark.parametrize("name", MEETS_WEIGHTS)
def test_data_from_numpy_meets_fp32_weights(level, low, name):
    layer, shape, rule = MEETS_WEIGHTS[name]
    x = torch.randn(shape)
    expected = rule(layer, x).detach()
    model = make_model(level, layer, rule)
    try:
        out = model(x.double())
        out.float().sum().backward()
    finally:
        amp.restore(model)
    assert out.dtype in (low, FP32)
    torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=5e-2)
    assert all(param.grad is not None for param in layer.parameters())
    layer.zero_grad()


def test_calls_of_float64_alone_stay_float64(level, low):
    model = make_model(level)
    x = torch.ones(4, 4, dtype=FP64)
    assert model(x).dtype is low
    for rule in (lambda: x @ x, x.exp, lambda: F.softmax(x, 0), lambda: F.linear(x, x)):
        assert rule().dtype is FP64


def test_a_compiled_model_takes_float64(level, low):
    model = torch.compile(make_model(level), backend="eager", fullgraph=True)
    assert model(torch.ones(2, 4)).dtype is low
    assert model(torch.ones(2, 4, dtype=FP64)).dtype is low
