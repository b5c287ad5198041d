"""Copies, pickles and files of prepared models, optimizers and parts of models are plain."""

import copy
import gc
import io
import itertools
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from apex import amp
from apex.parallel import LARC
from tests.support import loops

level = loops.at_levels(*loops.LEVELS)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": loops.saved_and_loaded}
way = loops.each_of(*WAYS.values(), ids=WAYS)


class NestedNet(nn.Module):
    """Has a tied weight, a frozen one, buffers, and a list that holds a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.outer = nn.Linear(4, 8)
        self.outer.weight = self.inner[0].weight
        self.frozen = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("shift", torch.rand(8))
        self.listed = [self.inner[0].weight]

    def forward(self, x):
        return self.inner(x) + self.outer(x) * self.frozen + self.shift


def step(model, optimizer, x):
    loops.descend(model(x).float().square().mean(), optimizer)


def pair_trained(level, make_optimizer=loops.OPTIMIZERS["Adam"]):
    pair = loops.prepared(level, make_optimizer, NestedNet())
    for x, _ in loops.batches(2):
        step(*pair, x)
    return pair


def assert_plain(copied, state):
    assert type(copied) is NestedNet
    assert copied.listed[0] is copied.outer.weight is copied.inner[0].weight
    assert not copied.frozen.requires_grad
    fresh = NestedNet()
    for module, plain in zip(copied.modules(), fresh.modules(), strict=True):
        assert vars(module).keys() == vars(plain).keys()
        assert not any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    assert loops.same(dict(copied.state_dict()), state)
    tensors = [*copied.parameters(), *copied.buffers()]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}


def test_a_model_becomes_its_plain_model_with_exact_values(level, way):
    model, _optimizer = pair_trained(level)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    copied = way(model)
    assert {type(param) for param in copied.parameters()} == {nn.Parameter}
    assert_plain(copied, state)
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            tensor.zero_()
    assert loops.same(dict(model.state_dict()), state)


def test_a_shallow_copy_is_plain_and_follows_the_training(level):
    model, optimizer = pair_trained(level)
    copied = copy.copy(model)
    assert_plain(copied, dict(model.state_dict()))
    if level == "O3":  # without masters, a plain model cannot share its parameters
        return
    step(model, optimizer, loops.batch()[0])
    with torch.no_grad():
        copied.outer.bias.fill_(0.3)
    state = model.state_dict()
    assert torch.equal(state["outer.bias"], torch.full((8,), 0.3))
    assert loops.same(copied.outer.weight.detach(), state["outer.weight"])


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_a_shallow_copy_shares_what_holds_no_module(level):
    model, _ = loops.prepared(level)
    model[0].lock = threading.Lock()  # which has no deep copy
    copied = copy.copy(model)
    assert copied[0].lock is model[0].lock
    copied.register_buffer("late", torch.ones(1), persistent=False)
    model.register_buffer("late", torch.ones(1))
    assert "late" not in copied.state_dict()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_copy_that_lives_on_does_not_hold_back_what_is_written_since(level, way):
    model = NestedNet().requires_grad_(False)  # without masters
    model, _ = loops.prepared(level, model=model, keep_batchnorm_fp32=False)
    earlier = [copy.copy(model), copy.copy(model.inner), copy.copy(model.outer)]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(2)  # which torch does not count
    assert loops.same(dict(way(model).state_dict()), dict(model.state_dict()))
    for copied in earlier:
        for tensor in copied.parameters():
            tensor.data.fill_(3)
    assert loops.same(dict(way(model).state_dict()), dict(model.state_dict()))


class CustomState(NestedNet):
    """Saves only what it was made from, as user classes may."""

    def __getstate__(self):
        return {"weights": nn.Module.state_dict(self)}

    def __setstate__(self, state):
        NestedNet.__init__(self)
        self.load_state_dict(state["weights"])


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_own_getstate_and_setstate_are_honoured(way, level):
    model, _ = loops.prepared(level, model=CustomState())
    twin = way(model)
    assert type(twin) is CustomState
    assert loops.same(dict(model.state_dict()), dict(twin.state_dict()))


def test_the_copy_of_a_part_is_plain(way):
    model, _ = pair_trained("O5")
    part = way(model.inner)
    assert not part._state_dict_hooks
    assert {param.dtype for param in part.parameters()} == {torch.float32}
    for copied in (part, model.inner.__deepcopy__({})):
        assert loops.same(dict(model.inner.state_dict()), dict(copied.state_dict()))


@loops.every(level=["O1", "O2"])
def test_a_copy_of_a_gradient_is_a_plain_tensor_that_trains(level, way):
    model, optimizer = loops.trained(level)
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    *_, bias = model.parameters()
    copied = way(bias.grad)
    bias.grad = copied.add_(0.125)
    loops.scaled_backward(loops.small_loss(model) * 0.0, optimizer)
    assert bias.grad.tolist() == [0.125, 0.125]
    loops.saved_and_loaded(bias.grad, weights_only=True)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_gone_with_its_last_reference(duplicate):
    model = amp.initialize(NestedNet(), opt_level="O5", verbosity=0)
    gc.collect()
    gc.disable()
    try:
        twin = weakref.ref(duplicate(model))
        assert twin() is None
    finally:
        gc.enable()


@loops.every(order=[*itertools.permutations(range(3))], level=["O1", "O3", "O5"])
def test_model_part_and_optimizer_stay_connected_in_any_order(level, way, order):
    model, optimizer = pair_trained(level)
    things = (model, model.inner, optimizer)
    copied = dict(zip(order, way([things[i] for i in order]), strict=True))
    twin, part, plain = (copied[i] for i in range(3))
    assert_plain(twin, dict(model.state_dict()))
    assert twin.inner is part
    assert type(plain) is torch.optim.Adam
    stepped = plain.param_groups[0]["params"]
    assert [id(p) for p in stepped] == [id(p) for p in twin.parameters()]
    for param, state in plain.state.items():
        assert state["exp_avg"].dtype is param.dtype is torch.float32
    before = twin.outer.bias.detach().clone()
    twin(loops.batch()[0]).sum().backward()
    plain.step()
    assert not torch.equal(twin.outer.bias, before)


def test_parameters_that_are_deep_copied_before_their_model_are_its_own(level):
    model, optimizer = pair_trained(level)
    things = [*model.parameters(), *model.buffers()], optimizer, model.inner, model
    tensors, plain, part, twin = copy.deepcopy(things)
    assert_plain(twin, dict(model.state_dict()))
    assert twin.inner is part
    held = [*twin.parameters(), *twin.buffers()]
    assert [id(t) for t in tensors] == [id(t) for t in held]
    stepped = plain.param_groups[0]["params"]
    assert [id(p) for p in stepped] == [id(p) for p in twin.parameters()]


def taken_over(module):
    """A module of another class with the attributes of this one."""
    other = Doubled.__new__(Doubled)
    other.__dict__.update(module.__dict__)
    return other


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_module_that_takes_over_attributes_is_copied_as_itself(level, is_kept):
    model, _ = pair_trained(level)
    kept = model.outer
    model.outer = taken_over(kept)
    if not is_kept:
        del kept
    expected = dict(model.outer.state_dict())
    for copied in (copy.deepcopy(model).outer, copy.deepcopy(model.outer)):
        assert type(copied) is Doubled
        assert loops.same(dict(copied.state_dict()), expected)


class Delegating:
    """Finds the attributes that it lacks on its model, as many agents and trainers do."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        if name in ("model", "__setstate__", "__getstate__"):
            raise AttributeError(name)
        return getattr(self.model, name)


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(("wrap", "inner"), [(compiled, "_orig_mod"), (Delegating, "model")])
def test_the_deep_copy_of_a_wrapper_is_a_wrapper_of_the_plain_model(level, wrap, inner):
    model, _ = pair_trained(level)
    wrapper = wrap(model)
    twin = copy.deepcopy(wrapper)
    assert type(twin) is type(wrapper)
    assert "__deepcopy__" not in vars(twin) | vars(wrapper)
    assert type(getattr(twin, inner)) is NestedNet
    assert loops.same(dict(twin.state_dict()), dict(wrapper.state_dict()))


@pytest.mark.parametrize(("wrap", "inner"), [(LARC, "optim"), (Delegating, "model")])
def test_the_deep_copy_of_a_wrapper_is_a_wrapper_of_the_plain_optimizer(level, wrap, inner):
    model, optimizer = pair_trained(level)
    wrapper = wrap(optimizer)
    twin_model, twin = copy.deepcopy((model, wrapper))
    assert type(twin) is type(wrapper)
    assert "__deepcopy__" not in vars(twin) | vars(wrapper)
    assert type(getattr(twin, inner)) is torch.optim.Adam
    assert twin.state_dict()["state"].keys() == wrapper.state_dict()["state"].keys()
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_a_shallow_copy_of_an_optimizer_is_plain_and_shares_groups_and_state(level):
    model, optimizer = pair_trained(level)
    copied = copy.copy(optimizer)
    assert type(copied) is torch.optim.Adam
    assert copied.param_groups is optimizer.param_groups
    assert copied.state is optimizer.state
    copied.param_groups[0]["lr"] = 0.0
    before = loops.masters(optimizer)
    step(model, optimizer, loops.batch()[0])
    assert loops.same(loops.masters(optimizer), before)


@pytest.mark.parametrize("level", loops.LEVELS_SHORT)
def test_an_optimizer_alone_is_plain_and_its_state_loads_back(level, way):
    model, optimizer = pair_trained(level)
    plain = way(optimizer)
    assert type(plain) is torch.optim.Adam
    expected = copy.deepcopy(optimizer.state_dict())
    assert loops.same(plain.state_dict(), expected)
    optimizer.load_state_dict(plain.state_dict())
    assert loops.same(optimizer.state_dict(), expected)
    weights = [*model.parameters()]
    step(model, optimizer, loops.batch()[0])  # it is still amp's, and rounds
    rounded = loops.values(weights)
    for weight, master in zip(rounded, loops.masters(optimizer), strict=True):
        assert torch.equal(weight, master.to(weight.dtype))


@loops.every(way=[*WAYS.values(), copy.copy], elsewhere=[False, True])
def test_a_copy_has_the_weights_that_were_written_since_the_last_step(way, elsewhere):
    model, optimizer = loops.trained("O5")
    expected = loops.masters(optimizer)
    with torch.no_grad():
        model[0].weight.view(-1)[1:] = expected[0].view(-1)[1:] = 0.25
        if elsewhere:
            model[0].weight.data = model[0].weight.detach().clone()
    assert loops.same(expected, loops.values(way(model).parameters()))


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_after_a_copy_that_failed_the_next_one_is_plain(level, way):
    model, _ = pair_trained(level)
    model.inner[0].lock = threading.Lock()  # which is neither copied nor pickled
    with pytest.raises(TypeError, match="pickle"):
        way(model)
    del model.inner[0].lock
    assert_plain(way(model), dict(model.state_dict()))


def test_a_copy_made_while_weights_are_swapped_leaves_the_masters(way):
    model, optimizer = loops.trained("O5")
    own, expected = loops.values(model.parameters()), loops.masters(optimizer)
    loops.change(model.parameters(), map(torch.zeros_like, own), "copy_")
    way((model, optimizer))
    loops.change(model.parameters(), own, "copy_")
    optimizer.zero_grad()
    loops.loss_of(model, *loops.batch()).mul(0).backward()
    optimizer.step()
    assert loops.same(loops.masters(optimizer), expected)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_a_copy_outlives_the_session_and_is_also_made_in_inference_mode(level):
    model, optimizer = loops.trained(level)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        copies = [copy.deepcopy(model), copy.deepcopy((model, optimizer))[0]]
    copies.append(copy.deepcopy(model))
    del model, optimizer
    gc.collect()
    assert amp.state_dict() == {}
    for copied in copies:
        assert loops.same(state, dict(copied.state_dict()))


def test_restore_returns_plain_copies_as_they_are():
    model, optimizer = pair_trained("O5")
    pair = copy.deepcopy((model, optimizer))
    assert amp.restore(*pair) == pair
    assert amp.restore(pair[0]) is pair[0]
    with pytest.raises(ValueError, match=r"optimizer .* not prepared"):
        amp.restore(model, pair[1])


def test_attributes_of_parameters_and_shared_objects_are_in_the_pickle():
    model, _optimizer = pair_trained("O5")
    model.outer.bias.no_decay = True
    shared = model.settings = model.inner.settings = {"depth": 1}
    for way in (copy.deepcopy, pickled):
        copied, settings = way((model, shared))
        assert copied.settings is copied.inner.settings is settings
    assert vars(copied.outer.bias) == {"no_decay": True}


def test_a_file_of_an_earlier_release_names_what_to_do():
    file = b"capex._pickle\nrebuild\n."
    with pytest.raises(ModuleNotFoundError, match=r"state_dict"):
        pickle.load(io.BytesIO(file))


WITHOUT_APEX = """
import sys, torch
sys.modules["apex"] = None  # an import of it fails
for model, optimizer in torch.load(sys.argv[1], weights_only=False):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_file_of_models_and_optimizers_trains_on_in_a_process_without_apex(tmp_path):
    file = tmp_path / "pairs.pt"
    torch.save([loops.trained(level, loops.OPTIMIZERS["Adam"]) for level in loops.LEVELS], file)
    subprocess.run([sys.executable, "-c", WITHOUT_APEX, str(file)], check=True)
    assert torch.load(file).keys() == loops.net().state_dict().keys()
