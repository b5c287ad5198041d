"""Models that arrive in 16 bits, wholly or in part, are prepared at every level."""

import copy

import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.support.steps import LOW, Net, backward, loss_of, sgd, train

LOW_DTYPES = [torch.float16, torch.bfloat16]
FP32_LEVELS = ("O0", "O1", "O4")
MASTER_LEVELS = ("O2", "O5")

every_level = pytest.mark.parametrize("level", ["O1", "O2", "O5"])
every_dtype = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=["fp16", "bf16"])


def wholly(model, dtype):
    return model.to(dtype)


def partly(model, dtype):
    model.last.to(dtype)
    model.norm.running_mean = model.norm.running_mean.to(dtype)
    return model


def both(model, dtype):
    model.first.to(torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)
    model.last.to(dtype)
    return model


every_kind = pytest.mark.parametrize("make", [wholly, partly, both])


def values(model):
    """The model's floating tensors, widened."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().double() for name, t in tensors if t.is_floating_point()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.0625, eps=2.0**-10, **options)


def stepped(model, make_optimizer=adam, steps=2):
    """An optimizer that has trained ``model`` in the dtype in which it arrives."""
    optimizer = make_optimizer(model)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
        model(x.to(model.first.weight.dtype)).float().pow(2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


# -- what they become ------------------------------------------------------------------------


@every_level
@every_dtype
@every_kind
def test_they_are_accepted_and_get_the_dtypes_of_the_level(level, dtype, make):
    model, expected = make(Net(), dtype), Net()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    amp.initialize(expected, sgd(expected), opt_level=level, verbosity=0)
    found = {name: t.dtype for name, t in model.state_dict(keep_vars=True).items()}
    assert found == {name: t.dtype for name, t in expected.state_dict(keep_vars=True).items()}
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", FP32_LEVELS)
@every_dtype
@every_kind
def test_where_the_model_is_fp32_values_stay_as_they_are(level, dtype, make):
    model = make(Net(), dtype)
    before = values(model)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert all(t.dtype is torch.float32 for t in model.parameters())
    assert equal(values(model), before)


@pytest.mark.parametrize("level", MASTER_LEVELS)
@every_dtype
@every_kind
def test_masters_are_the_values_as_they_are_whatever_the_model_s_dtype_becomes(level, dtype, make):
    model = make(Net(), dtype)
    before = [param.detach().float() for param in model.parameters()]
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    masters = list(amp.master_params(optimizer))
    assert all(map(torch.equal, masters, before))
    for param, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(param, master.to(param.dtype))


# -- training goes on ------------------------------------------------------------------------


def widened(model, optimizer, make_optimizer):
    """An fp32 model with the same values, and its optimizer with the same state in fp32."""
    wide = Net()
    wide.load_state_dict(model.state_dict())
    other = make_optimizer(wide)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # casts to fp32
    return wide, other


MAKERS = {
    "Adam": adam,
    "fused Adam": lambda model: adam(model, fused=True),
    "foreach Adam": lambda model: adam(model, foreach=True),
    "SGD": lambda model: sgd(model, momentum=0.9),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.0625, max_iter=2),
}


def train_with(model, optimizer):
    if not isinstance(optimizer, torch.optim.LBFGS):
        return train(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss, optimizer)
        return loss

    return [optimizer.step(closure).item() for _ in range(3)]


@every_level
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_with_16_bit_state_goes_on_as_one_with_that_state_in_fp32(level, name):
    make, model = MAKERS[name], Net().bfloat16()
    if name == "LBFGS":
        optimizer = make(model)  # its first step in 16 bits moves nothing
    else:
        optimizer = stepped(model, make)
        assert any(t.dtype is torch.bfloat16 for s in optimizer.state.values() for t in s.values())
    wide, wide_optimizer = widened(model, optimizer, make)
    pairs = [(model, optimizer), (wide, wide_optimizer)]
    for pair in pairs:
        amp.initialize(*pair, opt_level=level, loss_scale=64.0, verbosity=0)
    assert train_with(*pairs[0]) == train_with(*pairs[1])
    assert equal(values(model), values(wide))
    found, expected = (opt.state_dict()["state"] for _, opt in pairs)
    for key, state in expected.items():
        for entry, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert found[key][entry].dtype is tensor.dtype
                assert torch.equal(found[key][entry], tensor)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_frozen_part_stays_in_16_bits_and_trains_on_when_it_is_unfrozen(level):
    model = Net().bfloat16()
    optimizer = stepped(model)
    model.first.requires_grad_(False)
    exact = model.first.weight.detach().float()
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    assert model.first.weight.dtype is LOW[level]
    train(model, optimizer)
    model.first.requires_grad_(True)
    train(model, optimizer)
    masters = list(amp.master_params(optimizer))
    assert all(master.dtype is torch.float32 for master in masters)
    assert all(
        t.dtype is torch.float32
        for state in optimizer.state.values()
        for t in state.values()
        if t.dim()
    )
    assert not torch.equal(model.first.weight.float(), exact)


@pytest.mark.parametrize("level", FP32_LEVELS)
def test_what_is_added_in_16_bits_later_becomes_fp32_too(level):
    model = Net().bfloat16()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    model.last = nn.Linear(6, 2).bfloat16()
    optimizer.add_param_group({"params": model.last.parameters()})
    assert model.last.weight.dtype is torch.float32
    train(model, optimizer)


# -- the way back, and files -----------------------------------------------------------------


@every_level
@every_dtype
def test_restore_gives_fp32_with_the_values_that_arrived(level, dtype):
    model = Net().to(dtype)
    before = values(model)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    amp.restore(model, optimizer)
    assert all(param.dtype is torch.float32 for param in model.parameters())
    if level != "O3":
        assert equal(values(model), before)
    train_plain = loss_of(model)
    train_plain.backward()
    optimizer.step()


@every_level
def test_the_state_dict_is_fp32_and_holds_the_values_that_arrived(level):
    model = Net().bfloat16()
    before = values(model)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    saved = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
    assert all(tensor.dtype is torch.float32 for tensor in saved.values())
    if level != "O3":
        assert equal({name: tensor.double() for name, tensor in saved.items()}, before)
    del optimizer


# -- the report ------------------------------------------------------------------------------


def line(capsys):
    return [each for each in capsys.readouterr().out.splitlines() if "arrived in" in each]


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("O0", "they become float32"),
        ("O1", "they become float32"),
        ("O2", "fp32 masters start from their values"),
        ("O3", "they become float16"),
        ("O4", "they become float32"),
        ("O5", "fp32 masters start from their values"),
    ],
)
def test_the_report_says_so_in_one_line(capsys, level, words):
    model = Net().bfloat16()
    amp.initialize(model, sgd(model), opt_level=level)
    assert line(capsys) == [f"Net: 8 of 9 parameters and buffers arrived in bfloat16; {words}."]


def test_it_names_every_dtype_and_says_what_stays(capsys):
    amp.initialize([both(Net(), torch.bfloat16), Net()], opt_level="O5")
    expected = "Net, Net: 4 of 18 parameters and buffers arrived in float16 and bfloat16; they "
    assert line(capsys) == [expected + "become bfloat16."]
    amp.initialize(Net().bfloat16(), opt_level="O5")
    assert line(capsys)[0].endswith("they stay as they are.")
