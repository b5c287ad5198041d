"""A look through everything that a model and its optimizer hold."""

import pytest
import torch

from apex import amp
from tests.support.loops import batch, net, prepared, train_step


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def test_a_sound_model_has_none():
    model, optimizer = prepared("O5", adam)
    train_step(model, optimizer, *batch())
    assert amp.debug.check_numerics(model, optimizer) == []


def test_each_role_is_told_with_its_counts():
    model, optimizer = prepared("O5", adam)
    train_step(model, optimizer, *batch())
    master = next(amp.master_params(optimizer))
    optimizer.state[master]["exp_avg"][0, :2] = torch.inf
    master.data[1, 1] = torch.nan
    model[2].weight.data[0, 0] = torch.nan
    model[2].weight.data[0, 1] = -torch.inf
    found = amp.debug.check_numerics(model, optimizer)
    assert {(i.name, i.role, i.dtype, i.inf, i.nan) for i in found} == {
        ("0.weight", "master", "float32", 0, 1),
        ("0.weight", "state exp_avg", "float32", 2, 0),
        ("2.weight", "parameter", "bfloat16", 1, 1),
    }
    assert "2.weight (1 inf, 1 nan of 16), parameter in bfloat16" in map(str, found)


def test_infinities_of_a_mask_are_no_fault_in_a_buffer():
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    assert amp.debug.check_numerics(model) == []
    model.running_var.fill_(torch.inf)
    model.mask[0, 0] = torch.nan
    assert [item.name for item in amp.debug.check_numerics(model)] == ["running_var", "mask"]


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        amp.debug.check_numerics([net()])
    with pytest.raises(TypeError, match="got Linear instead of an optimizer"):
        amp.debug.check_numerics(net(), torch.nn.Linear(1, 1))
