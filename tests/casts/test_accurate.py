"""Operators with inaccurate 16-bit kernels run in fp32, also inside 16-bit models."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.support.loops import prepared, scaled_backward

LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
LEVELS = pytest.mark.parametrize("level", LOW)


class Uses(nn.Module):
    def __init__(self, rule, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) * 2 - 1)
        self.scale, self.rule = nn.Parameter(torch.ones(1)), rule
        self.found = []

    def forward(self, x):
        out = self.rule(self.weight, x)
        self.found.append(out.dtype)
        return out * self.scale


RULES = {
    "torch.matrix_exp": (lambda w, x: torch.matrix_exp(w), (4, 4)),
    "torch.linalg.matrix_exp": (lambda w, x: torch.linalg.matrix_exp(w), (4, 4)),
    "Tensor.matrix_exp": (lambda w, x: w.matrix_exp(), (2, 4, 4)),
    "grid_sample": (lambda w, x: F.grid_sample(x, w, align_corners=False), (1, 9, 9, 2)),
    "logcumsumexp": (lambda w, x: torch.logcumsumexp(w * 9, 0), (50,)),
    "pool": (lambda w, x: F.adaptive_avg_pool3d(w, 2), (1, 1, 24, 24, 24)),
}


def used(name, level):
    torch.manual_seed(0)
    rule, shape = RULES[name]
    model = Uses(rule, shape)
    with torch.no_grad():  # exact in 16 bits
        model.weight.copy_(model.weight.to(LOW[level]))
    x = torch.rand(1, 1, 64, 64).to(LOW[level]).float()
    return model, x


@LEVELS
@pytest.mark.parametrize("name", RULES)
def test_an_inaccurate_operator_runs_in_fp32_in_a_16_bit_model(level, name):
    model, x = used(name, level)
    plain = copy.deepcopy(model)
    expected = plain(x)
    expected.cos().mean().mul(100).backward()
    model, optimizer = prepared(level, model=model, loss_scale=1.0)
    got = model(x)
    scaled_backward(got.float().cos().mean().mul(100), optimizer)
    assert model.found == [LOW[level]]
    roundings = 3 * torch.finfo(LOW[level]).eps
    torch.testing.assert_close(got.float(), expected, rtol=roundings, atol=roundings)
    grad, wanted = next(amp.master_params(optimizer)).grad.float(), plain.weight.grad
    torch.testing.assert_close(grad, wanted, rtol=9e-2, atol=6 * roundings * wanted.abs().max())


class Rotates(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ torch.matrix_exp(self.weight)


def rotates():
    torch.manual_seed(0)
    model = Rotates(4, 4)
    expected = model(torch.eye(4))
    return amp.initialize(model, opt_level="O5", verbosity=0), expected


def same(model):
    return model


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def compiled(model):
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize("made", [same, copy.deepcopy, pickled, compiled])
def test_later_passes_copies_and_compiled_models_do_so_too(made):
    model, expected = rotates()
    with torch.no_grad():
        for _ in range(40):
            out = made(model)(torch.eye(4))
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


def test_it_is_logged_once(caplog):
    model, x = used("torch.matrix_exp", "O5")
    model = amp.initialize(model, opt_level="O5", verbosity=0)
    with caplog.at_level(logging.WARNING, "apex"):
        for _ in range(3):
            model(x)
    (record,) = caplog.records
    assert "matrix_exp runs in fp32 in this 16-bit model" in record.getMessage()
