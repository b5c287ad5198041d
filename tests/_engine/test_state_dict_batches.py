"""Entries of many modules are converted together: nobody sees that, who looks or interrupts."""

import copy
import inspect
import sys
from threading import Thread

import pytest
import torch
from torch import nn

from tests._engine.conversion_cases import LOW, Net, Tied, with_masters


class Watching:
    """Records the dtypes of the entries that code run by ``state_dict`` finds in the dict."""

    def __init__(self):
        self.seen = []

    def look(self, destination):
        # A module's own entries stay 16-bit until those inside are saved.
        entries = [entry for name, entry in destination.items() if name != "1.shift"]
        self.seen.append({entry.dtype for entry in entries})

    def __call__(self, module, destination, prefix, metadata):
        self.look(destination)


class SavesOwn(nn.Linear):
    look = Watching.look

    def __init__(self):
        super().__init__(2, 2)
        self.seen = []

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.look(destination)
        super()._save_to_state_dict(destination, prefix, keep_vars)


class OwnStateDict(SavesOwn):
    _save_to_state_dict = nn.Module._save_to_state_dict

    def state_dict(self, *args, destination=None, **kwargs):
        result = super().state_dict(*args, destination=destination, **kwargs)
        self.look(result)
        return result


def saves_own(model):
    model[1] = SavesOwn()
    return model[1]


def own_state_dict(model):
    model[1] = OwnStateDict()
    return model[1]


def hook_of_a_layer(model):
    watching = Watching()
    model[1].last.register_state_dict_post_hook(watching)
    return watching


def hook_of_a_layer_in_fp32(model):
    watching = Watching()
    model[1].norm.register_state_dict_post_hook(watching)
    return watching


def hook_of_the_model(model):
    watching = Watching()
    model.register_state_dict_post_hook(watching)
    return watching


def function_set_on_a_layer(model):
    watching, own = Watching(), model[1].state_dict

    def state_dict(*args, **kwargs):
        watching.look(kwargs["destination"])
        return own(*args, **kwargs)

    model[1].state_dict = state_dict
    return watching


WATCHERS = [
    *(saves_own, own_state_dict, hook_of_a_layer, hook_of_a_layer_in_fp32),
    *(hook_of_the_model, function_set_on_a_layer),
]


def network(*, by_hooks=False):
    """A model that is saved whole, or, because of a hook of the user's, by the modules' hooks."""
    model = nn.Sequential(Net(), Net(), nn.Sequential(Tied(), Net()))
    if by_hooks:
        model.register_state_dict_post_hook(lambda *args: None)
    return model


BY_HOOKS = pytest.mark.parametrize("by_hooks", [False, True])


def assert_exact(state, model, masters, prefix=""):
    assert list(state) == [prefix + name for name in model.state_dict()]
    for name, param in model.named_parameters(remove_duplicate=False):
        entry, exact = state[prefix + name], masters.master_of(param)
        assert entry.dtype is torch.float32
        assert torch.equal(entry, param if exact is None else exact)


@pytest.mark.parametrize("watch", WATCHERS)
@pytest.mark.parametrize("late", [False, True])
def test_code_that_looks_at_entries_sees_fp32_only(watch, late):
    model = network()
    watching = None if late else watch(model)
    model, masters = with_masters(model)
    if late and watch not in (saves_own, own_state_dict):
        watching = watch(model)
    state = model.state_dict()
    assert_exact(state, model, masters)
    if watching is not None:
        assert watching.seen
        assert LOW not in set().union(*watching.seen)


def test_a_pre_hook_may_write_to_its_layer():
    model, masters = with_masters(network())
    target = model[1].last.weight

    def write(module, prefix, keep_vars):
        target.data.fill_(3.0)

    model[1].last.register_state_dict_pre_hook(write)
    state = model.state_dict()
    assert torch.equal(state["1.last.weight"], torch.full((2, 4), 3.0))
    assert_exact(model[2].state_dict(), model[2], masters)


def test_tied_entries_share_memory_across_hooks():
    model = nn.Sequential(Tied(), nn.Sequential(nn.Linear(3, 5), Tied()), Net())
    model[1][0].weight = model[1][1].embed.weight = model[0].embed.weight
    model[1].register_state_dict_post_hook(lambda *args: None)
    model, _ = with_masters(model)
    state = model.state_dict()
    tied = "0.embed.weight", "0.head.weight", "1.0.weight", "1.1.embed.weight"
    assert len({id(state[name]) for name in tied}) == 1


@BY_HOOKS
def test_every_entry_has_memory_of_its_own(by_hooks):
    model, _ = with_masters(network(by_hooks=by_hooks))
    for entry in model.state_dict().values():
        assert entry.untyped_storage().nbytes() == entry.nbytes


@BY_HOOKS
def test_a_plain_dict_takes_the_entries(by_hooks):
    model, masters = with_masters(network(by_hooks=by_hooks))
    state = model.state_dict(destination={})
    assert type(state) is dict
    assert_exact(state, model, masters)


@BY_HOOKS
def test_a_dict_has_torch_s_type_metadata_and_order(by_hooks):
    plain = network()
    model, _ = with_masters(copy.deepcopy(plain))
    if by_hooks:
        model.register_state_dict_post_hook(lambda *args: None)
    for own, expected in ((model, plain), (nn.ModuleList([model]), nn.ModuleList([plain]))):
        state, torch_s = own.state_dict(), expected.state_dict()
        assert type(state) is type(torch_s)
        assert list(state) == list(torch_s)
        assert list(state._metadata.items()) == list(torch_s._metadata.items())


def test_the_method_has_torch_s_signature():
    model, masters = with_masters(network())
    assert inspect.signature(model.state_dict) == inspect.signature(network().state_dict)
    assert_exact(type(model).state_dict(self=model), model, masters)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model.state_dict(unknown=1)


def test_a_method_set_on_the_models_own_class_later_is_called(monkeypatch):
    class Own(nn.Sequential):
        pass

    model, _ = with_masters(Own(Net()))
    monkeypatch.setattr(Own, "state_dict", lambda self: {"n": 3}, raising=False)
    assert model.state_dict() == {"n": 3}


@BY_HOOKS
def test_16_bit_layers_that_amp_has_not_converted_stay(by_hooks):
    model, masters = with_masters(network(by_hooks=by_hooks))
    model[1].late = nn.Linear(2, 2).to(LOW)
    state = model.state_dict()
    assert state["1.late.weight"].dtype is LOW
    assert torch.equal(state["1.last.weight"], masters.master_of(model[1].last.weight))


def test_a_model_inside_a_plain_one():
    model, masters = with_masters(network())
    parent = nn.ModuleDict({"inner": model})
    assert_exact(parent.state_dict(), model, masters, prefix="inner.")


def test_a_module_that_two_models_share():
    shared = Net()
    first, masters = with_masters(nn.Sequential(Net(), shared))
    second, _ = with_masters(nn.Sequential(shared, Net()))
    assert_exact(first.state_dict(), first, masters)
    exact = masters.master_of(shared.last.weight)
    assert torch.equal(second.state_dict()["0.last.weight"], exact)


def test_masters_that_are_gone_leave_the_rounded_values():
    model, _ = with_masters(network())
    copied = copy.deepcopy(model)
    for name, entry in copied.state_dict().items():
        assert entry.dtype in (torch.float32, torch.int64)
        assert torch.equal(entry, copied.state_dict(keep_vars=True)[name].to(entry.dtype))


# -- calls within and after calls ------------------------------------------------------------------


class Stopped(BaseException):
    """Ends a call as Ctrl-C does."""


def at_module(number, action, call):
    """Returns ``call()``, with ``action`` run when its ``number``-th module begins to save."""
    left = [number]

    def profile(frame, event, arg):
        if event == "call" and frame.f_code is nn.Module._save_to_state_dict.__code__:
            left[0] -= 1
            if left[0] == 0:
                sys.setprofile(None)
                action()

    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(None)


def stop():
    raise Stopped


MODULES = len(list(network().modules()))


@BY_HOOKS
@pytest.mark.parametrize("number", range(1, MODULES + 1))
def test_a_call_within_a_call_leaves_both_exact(number, by_hooks):
    """As a signal handler that saves does."""
    model, masters = with_masters(network(by_hooks=by_hooks))
    inner = []
    for part in (model, model[1], model[2][1].last):
        state = at_module(
            number, lambda part=part: inner.append(part.state_dict()), model.state_dict
        )
        assert_exact(state, model, masters)
        assert_exact(inner.pop(), part, masters)


@BY_HOOKS
@pytest.mark.parametrize("number", range(1, MODULES + 1))
def test_a_call_in_another_thread_leaves_both_exact(number, by_hooks):
    model, masters = with_masters(network(by_hooks=by_hooks))
    inner = []

    def other():
        thread = Thread(target=lambda: inner.append(model.state_dict()))
        thread.start()
        thread.join()

    assert_exact(at_module(number, other, model.state_dict), model, masters)
    assert_exact(inner.pop(), model, masters)


@BY_HOOKS
@pytest.mark.parametrize("number", range(2, MODULES + 1))
def test_calls_after_an_interrupted_one_are_exact(number, by_hooks):
    model, masters = with_masters(network(by_hooks=by_hooks))
    for part, prefix in ((model[0], "0."), (model[0].first, "0.first."), (model[2][0], "2.0.")):
        for name in (prefix, ""):
            with pytest.raises(Stopped):
                at_module(number, stop, model.state_dict)
            before = masters.written_back
            assert_exact(part.state_dict(prefix=name), part, masters, prefix=name)
            assert masters.written_back > before or name
    assert_exact(model.state_dict(), model, masters)
    assert not model._apex_state.link.batch.inside


@BY_HOOKS
def test_an_interrupted_call_keeps_no_entry(by_hooks):
    model, _ = with_masters(network(by_hooks=by_hooks))
    with pytest.raises(Stopped):
        at_module(MODULES, stop, model.state_dict)
    model[0].state_dict()
    assert not model._apex_state.link.batch.inside


@BY_HOOKS
def test_a_part_saved_again_into_the_dict_of_the_whole(by_hooks):
    model, masters = with_masters(network(by_hooks=by_hooks))
    whole = model.state_dict()
    for part, prefix in ((model[0], "again."), (model[2][1].last, "last."), (model[1], "1.")):
        part.state_dict(destination=whole, prefix=prefix)
        again = {name: entry for name, entry in whole.items() if name.startswith(prefix)}
        assert_exact(again, part, masters, prefix=prefix)
