"""Models that arrive in 16 bits, wholly or in part, are prepared at every level."""

import copy

import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.support import loops


def partly(dtype):
    model = loops.Net()
    model.last.to(dtype)
    model.norm.running_mean = model.norm.running_mean.to(dtype)
    return model


def both(dtype):
    model = loops.Net()
    model.first.to(torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)
    model.last.to(dtype)
    return model


def values(model):
    """The model's floating tensors, widened."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().double() for name, t in tensors if t.is_floating_point()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_they_get_the_level_s_dtypes_train_and_give_back_the_values_that_arrived(level, dtype):
    for make in (lambda dtype: loops.Net().to(dtype), partly, both):
        model, expected = make(dtype), loops.Net()
        before = values(model)
        _, optimizer = loops.prepared(level, model=model)
        amp.initialize(expected, loops.sgd(expected.parameters()), opt_level=level, verbosity=0)
        found = {name: t.dtype for name, t in model.state_dict(keep_vars=True).items()}
        assert found == {n: t.dtype for n, t in expected.state_dict(keep_vars=True).items()}
        saved = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
        assert all(tensor.dtype is torch.float32 for tensor in saved.values())
        assert equal({name: tensor.double() for name, tensor in saved.items()}, before)
        losses = loops.train(model, optimizer, data=loops.small_batches(3))
        assert losses[-1] < losses[0]
        del expected
        amp.restore(model, optimizer)
        assert all(param.dtype is torch.float32 for param in model.parameters())


# -- training goes on ------------------------------------------------------------------------


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.0625, eps=2.0**-10, **options)


MAKERS = {
    "Adam": adam,
    "fused Adam": lambda model: adam(model, fused=True),
    "SGD": lambda model: loops.sgd(model.parameters(), momentum=0.9),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.0625, max_iter=2),
}


def stepped(model, make_optimizer):
    """An optimizer that has trained ``model`` in the dtype in which it arrives."""
    optimizer = make_optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
        model(x.to(model.first.weight.dtype)).float().pow(2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def widened(model, optimizer, make_optimizer):
    """An fp32 model with the same values, and its optimizer with the same state in fp32."""
    wide = loops.Net()
    wide.load_state_dict(model.state_dict())
    other = make_optimizer(wide)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # casts to fp32
    return wide, other


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_with_16_bit_state_goes_on_as_one_with_that_state_in_fp32(level, name):
    make, model = MAKERS[name], loops.Net().bfloat16()
    if name == "LBFGS":
        optimizer = make(model)  # its first step in 16 bits moves nothing
    else:
        optimizer = stepped(model, make)
        assert any(t.dtype is torch.bfloat16 for s in optimizer.state.values() for t in s.values())
    wide, wide_optimizer = widened(model, optimizer, make)
    pairs = [(model, optimizer), (wide, wide_optimizer)]
    for pair in pairs:
        amp.initialize(*pair, opt_level=level, loss_scale=64.0, verbosity=0)
    step = loops.train_step_with_closure if name == "LBFGS" else loops.train_step
    for x, y in loops.small_batches(3):
        assert step(*pairs[0], x, y) == step(*pairs[1], x, y)
    assert equal(values(model), values(wide))
    found, expected = (opt.state_dict()["state"] for _, opt in pairs)
    for key, state in expected.items():
        for entry, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert found[key][entry].dtype is tensor.dtype
                assert torch.equal(found[key][entry], tensor)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_a_frozen_part_stays_in_16_bits_and_trains_on_when_it_is_unfrozen(level):
    model = loops.Net().bfloat16()
    optimizer = stepped(model, adam)
    model.first.requires_grad_(False)
    exact = model.first.weight.detach().float()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    assert model.first.weight.dtype is not torch.float32
    loops.train(model, optimizer, data=loops.small_batches(3))
    optimizer.load_state_dict(optimizer.state_dict())
    model.first.requires_grad_(True)
    loops.train(model, optimizer, data=loops.small_batches(3))
    tensors = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert {t.dtype for t in (*amp.master_params(optimizer), *tensors)} == {torch.float32}
    assert not torch.equal(model.first.weight.float(), exact)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_what_is_added_in_16_bits_later_becomes_fp32_too(level):
    model, optimizer = loops.prepared(level, model=loops.Net().bfloat16())
    model.last = nn.Linear(6, 2).bfloat16()
    optimizer.add_param_group({"params": model.last.parameters()})
    assert model.last.weight.dtype is torch.float32
    loops.train(model, optimizer, data=loops.small_batches(3))
