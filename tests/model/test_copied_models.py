"""Deep copies, pickles and compiled or traced forms of prepared models."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from tests.model.nets import BufferNet, Echo, converted, dtypes_of, with_masters, x
from tests.support.loops import same, saved_and_loaded

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle 5": lambda m: pickle.loads(pickle.dumps(m, 5)),
    "torch.save": saved_and_loaded,
}
every_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())


class CustomState(BufferNet):
    """Saves only what it was made from, as user classes may."""

    def __getstate__(self):
        return {"weights": nn.Module.state_dict(self)}

    def __setstate__(self, state):
        BufferNet.__init__(self)
        self.load_state_dict(state["weights"])


class CustomReduce(nn.Linear):
    def __reduce__(self):
        return type(self), (self.in_features, self.out_features)


class OwnDeepCopy(nn.Linear):
    def __deepcopy__(self, memo):
        twin = type(self)(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


@every_copy
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_own_getstate_and_setstate_are_honoured(duplicate, level):
    model = converted(CustomState(), level).eval()
    twin = duplicate(model).eval()
    assert type(twin) is CustomState
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


@every_copy
def test_own_reduce_is_honoured(duplicate):
    twin = duplicate(converted(CustomReduce(3, 2)))
    assert type(twin) is CustomReduce
    assert twin.weight.dtype is torch.float32


def test_own_deepcopy_is_honoured():
    model = converted(OwnDeepCopy(3, 2))
    twin = copy.deepcopy(model)
    assert type(twin) is OwnDeepCopy
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


@every_copy
def test_the_copy_of_a_part_is_plain(duplicate):
    model, _ = with_masters(nn.Sequential(BufferNet()), "O5")
    twin = duplicate(model[0])
    assert not twin._state_dict_hooks
    assert set(dtypes_of(twin).values()) <= {torch.float32, torch.int64}
    assert same(dict(model[0].state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_gone_with_its_last_reference(duplicate):
    model = converted(BufferNet())
    gc.collect()
    gc.disable()
    try:
        twin = weakref.ref(duplicate(model))
        assert twin() is None
    finally:
        gc.enable()


def test_a_copied_forward_of_the_object_is_bound_to_the_copy():
    model = Echo()
    model.weight = nn.Parameter(torch.ones(1))
    model.forward = model.forward  # a bound method on the object
    converted(model)
    twin = copy.deepcopy(model)
    twin(x())
    assert twin.seen is not None
    assert model.seen is None
