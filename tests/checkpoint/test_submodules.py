"""``state_dict`` and ``load_state_dict`` of parts of a prepared model, and of what contains it."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from apex import amp
from tests.support import loops

level = loops.at_levels(*loops.WITH_MASTERS)


def nested():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))


def random_like(state):
    generator = torch.Generator().manual_seed(7)
    return {name: torch.rand(value.shape, generator=generator) for name, value in state.items()}


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_every_part_is_saved_as_in_the_whole(level):
    model, _ = loops.trained(level, model=nested())
    whole = model.state_dict()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        part = module.state_dict(prefix=prefix)
        assert loops.same({key: whole[key] for key in part}, dict(part))
        assert all(value.dtype is torch.float32 for value in part.values())


def replaced(model):
    """As what adds adapters does: a module of another class gets the parameters."""
    linear = nn.Linear(8, 2)
    linear.weight, linear.bias = model[1].weight, model[1].bias
    model[1] = nn.Sequential(nn.Identity(), linear)


def parametrized(model):
    parametrize.register_parametrization(model[1], "weight", nn.Identity())


@pytest.mark.parametrize("move", [replaced, parametrized])
def test_a_module_that_takes_over_parameters_is_saved_and_loaded_to_the_last_bit(level, move):
    model, optimizer = loops.trained(level, model=nested())
    masters = dict(zip(map(id, model.parameters()), amp.master_params(optimizer), strict=True))
    move(model)
    for module in (model, model[1]):
        exact = {name: masters[id(param)].detach() for name, param in module.named_parameters()}
        assert loops.same(dict(module.state_dict()), exact)
        module.load_state_dict(random_like(exact))
        assert loops.same(exact, random_like(exact))


def test_a_module_that_takes_over_parameters_is_pickled_to_the_last_bit(level):
    model, optimizer = loops.trained(level, model=nested())
    expected = loops.masters(optimizer)
    replaced(model)
    for module, values in ((model, expected), (model[1], expected[2:])):
        plain = pickle.loads(pickle.dumps(module))
        assert loops.same(loops.values(plain.parameters()), values)


def test_a_parent_with_two_prepared_models_saves_and_loads_both(level):
    pairs = [loops.trained(level, model=nested()) for _ in range(2)]
    parent = nn.ModuleDict({"first": pairs[0][0], "second": pairs[1][0]})
    new = random_like(parent.state_dict())
    parent.load_state_dict(new)
    assert loops.same(dict(parent.state_dict()), new)
    masters = [master for _, optimizer in pairs for master in loops.masters(optimizer)]
    assert loops.same(masters, list(new.values()))


def test_a_part_that_loads_in_part_keeps_the_masters_of_the_rest(level):
    model, optimizer = loops.trained(level, model=nested())
    before = loops.masters(optimizer)
    weight = torch.rand(8, 4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model[0].load_state_dict({"0.weight": weight, "0.bias": torch.zeros(3)})
    assert loops.same([weight, *before[1:]], loops.masters(optimizer))
    model[1].load_state_dict({"bias": torch.full((2,), 1 / 3)}, strict=False)
    assert loops.same([weight, *before[1:3], torch.full((2,), 1 / 3)], loops.masters(optimizer))


class Fixed(nn.Linear):
    """Keeps its weights, whatever is loaded."""

    def _load_from_state_dict(self, *_):
        pass


def test_a_module_that_loads_nothing_keeps_its_weights(level):
    model, optimizer = loops.trained(level, model=nn.Sequential(Fixed(4, 8), nn.Linear(8, 2)))
    before = loops.values(model[0].parameters())
    model.load_state_dict(random_like(model.state_dict()))
    loops.loss_of(model, *loops.batch())
    assert loops.same(before, loops.values(model[0].parameters()))
    assert loops.agree(model, optimizer)


def test_a_buffer_that_moves_or_is_loaded_is_saved_and_restored_to_the_last_bit(level):
    model = loops.net()
    model[0].register_buffer("image", torch.rand(1, 2, 3, 3))
    value = model[0].image.clone()
    model, optimizer = loops.prepared(level, model=model)
    model.to(memory_format=torch.channels_last)
    assert model[0].image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.state_dict()["0.image"], value)
    model.load_state_dict({"0.image": value / 3}, strict=False)
    assert torch.equal(model.state_dict()["0.image"], value / 3)
    amp.restore(model, optimizer)
    assert torch.equal(model[0].image, value / 3)


def load_as_mmcv(module, state, prefix=""):
    """Loads as mmcv 1.x does: torch's post-hooks do not run."""
    module._load_from_state_dict(state, prefix, {}, True, [], [], [])
    for name, child in module.named_children():
        load_as_mmcv(child, state, f"{prefix}{name}.")


def test_a_loader_of_another_library_sets_the_masters_to_the_last_bit(level):
    model, optimizer = loops.trained(level, model=nested())
    new = random_like(model.state_dict())
    load_as_mmcv(model, new)
    assert loops.same(dict(model.state_dict()), new)
    optimizer.zero_grad()
    loops.backward(model, optimizer, *loops.batch(3))
    assert loops.same(loops.masters(optimizer), list(new.values()))


@pytest.fixture
def swaps():
    """Loading exchanges parameters for new ones, the default of a future torch."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_loading_by_swapping_parameters_sets_the_masters(level, swaps):
    model, optimizer = loops.trained(level, loss_scale=1.0, steps=1)
    weights = {n: torch.randn_like(value) for n, value in model.state_dict().items()}
    optimizer.zero_grad()
    model.load_state_dict(weights)
    assert loops.same(model.state_dict(), weights)
    assert loops.same(loops.masters(optimizer), list(weights.values()))
    loops.train_step(model, optimizer, *loops.batch())
    rounded = [value.to(loops.LEVELS[level].stored) for value in loops.masters(optimizer)]
    assert loops.same(list(model.parameters()), rounded)
    assert not loops.same(loops.masters(optimizer), list(weights.values()))
