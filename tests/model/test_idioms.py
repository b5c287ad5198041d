"""A prepared model is still its owner's object: what real classes do with themselves goes on."""

import copy
import traceback

import pytest
import torch
from torch import nn

from apex import amp
from tests.model.idioms import IDIOMS
from tests.model.test_data_parallel import replicate
from tests.support.host_reads import calls_inside
from tests.support.loops import LEVELS, at_levels, descend, prepared, same, saved_and_loaded


def plain(value):
    """Returns what a use saw, with tensors as numbers."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", IDIOMS)
def test_a_prepared_model_does_what_its_class_does(name):
    cls, use = IDIOMS[name]
    expected = plain(use(cls(2, 2)))
    for level in LEVELS:
        model = cls(2, 2)
        optimizer = torch.optim.SGD(dict(model.named_parameters()).values(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert plain(use(model)) == expected, level
        if name not in ("ChangesClass", "ForwardIsAProperty"):
            amp.restore(model, optimizer)
            assert type(model) is model.__class__


level = at_levels(*LEVELS)


class Failing(nn.Linear):
    """Raises errors of its own, in 16-bit words."""

    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        raise self.error("Half of the samples are empty")

    def encode(self, x):
        return self.inner(x)

    def _apply(self, fn):
        raise self.error("Half of it moved")

    def zero_grad(self):
        raise self.error("expected scalar type Half")


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError])
def test_an_error_of_the_model_keeps_its_text_and_its_lines(level, error):
    model = Failing(2, 2)
    model.error = error
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.ones(1, 2)
    calls = (model, model.forward, model.encode, model.cpu, model.zero_grad)
    for call, args in zip(calls, ((x,), (x,), (x,), (), ()), strict=True):
        with pytest.raises(error, match=r"^(Half of|expected)[a-zA-Z ]*$") as raised:
            call(*args)
        frames = traceback.extract_tb(raised.value.__traceback__)
        assert sum("/apex/" in frame.filename for frame in frames) <= 1
        assert frames[-1].line.startswith("raise self.error")
        assert raised.value.__cause__ is None


class Groups(nn.Linear):
    """Its ``parameters()`` are an optimizer's groups, as in nerfstudio's fields."""

    def parameters(self, recurse=True):
        return [{"params": [self.weight]}, {"params": [self.bias], "lr": 0.2}]


def test_a_model_whose_parameters_are_groups_trains_as_one_whose_are_not(level):
    trained = []
    for cls in (Groups, nn.Linear):
        torch.manual_seed(0)
        model = cls(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=4.0)
        beside = nn.Parameter(torch.ones(1))
        beside.grad = torch.ones(1)
        torch.optim.SGD([beside], lr=0.5).step()  # of no prepared model
        assert beside.item() == 0.5
        for _ in range(2):
            descend(model(torch.ones(1, 2)).float().sum(), optimizer)
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[1])


class Listed(nn.Sequential):
    """Its ``modules`` are a list, as in dreamer-pytorch."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.modules = [*parts]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_model_whose_modules_are_a_list_trains_as_one_whose_are_not(level):
    trained = []
    for cls in (Listed, nn.Sequential):
        torch.manual_seed(0)
        model = cls(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=4.0)
        model.load_state_dict(model.state_dict())
        with amp.debug.trace_overflow(model):
            descend(model(torch.eye(2)).float().square().sum(), optimizer)
        assert amp.debug.check_numerics(model, optimizer) == []
        copied = copy.deepcopy(model)
        amp.restore(model, optimizer)
        trained.append((model.state_dict(), copied.state_dict()))
    assert same(*trained)


# -- methods that see written masters --------------------------------------------------------------


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)

    def sample(self, z):
        return self.net(z)

    def stream(self, z):
        yield self.net(z)

    def outer(self, z):
        return self.sample(z)


USES = {
    "forward": lambda model, z: model.forward(z),
    "sample": lambda model, z: model.sample(z),
    "outer": lambda model, z: model.outer(z),
    "stream": lambda model, z: next(model.stream(z)),
    "parameters": lambda model, z: nn.functional.linear(
        z, *[p.detach() for p in model.parameters()]
    ),
    "replica": lambda model, z: replicate(model)(z),
    "function": lambda model, z: torch.func.functional_call(
        model, {k: p.detach().clone() for k, p in model.named_parameters()}, (z,)
    ),
    "deep copy": lambda model, z: copy.deepcopy(model)(z.float()),
    "saved": lambda model, z: saved_and_loaded(model)(z.float()),
    "state_dict": lambda model, z: nn.functional.linear(z.float(), *model.state_dict().values()),
    "restored": lambda model, z: amp.restore(model)(z.float()),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_every_use_sees_masters_that_a_script_has_written(level, use):
    model, optimizer = prepared(level, model=Sampler())
    z = torch.ones(1, 2, dtype=model.net.weight.dtype)
    for master in amp.master_params(optimizer):
        master.data.copy_(torch.full_like(master, 2.0))
    assert (use(model, z) == 6).all()


# -- many models -----------------------------------------------------------------------------------


def test_a_forward_costs_the_same_beside_many_models(level):
    counts = []
    for number in (1, 50):
        models = [nn.Linear(2, 2) for _ in range(number)]
        params = [param for model in models for param in model.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        amp.initialize(models, optimizer, opt_level=level, verbosity=0)
        for _ in range(300):
            models[0](torch.ones(1, 2))
        counts.append(calls_inside(models[0], torch.ones(1, 2)))
        amp.restore(models, optimizer)
    assert counts[0] == counts[1]


class OwnHalf(nn.Linear):
    """Has methods of its own under names of torch's."""

    def half(self, x, part=0):
        return x.chunk(2, -1)[part]

    def double(self, x):
        return torch.cat([x, x], -1)

    def forward(self, x):
        return super().forward(self.double(self.half(x, part=1)))


def test_a_model_may_have_methods_of_its_own_for_half_and_double(level):
    torch.manual_seed(0)
    model = OwnHalf(4, 2)
    expected = copy.deepcopy(model)(torch.ones(2, 4))
    model, _ = prepared(level, model=model)
    torch.testing.assert_close(model(torch.ones(2, 4)).float(), expected, rtol=0.02, atol=0.02)
    assert type(model.bfloat16()) is OwnHalf
