"""Deep copies, pickles and compiled or traced forms of prepared models."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from apex.amp import restore
from tests.model.nets import LOW, BufferNet, Echo, converted, dtypes_of, x
from tests.support.loops import saved_and_loaded

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
def test_a_copy_casts_as_the_original_with_weights_of_its_own_and_is_restored_alone(duplicate):
    model = converted(BufferNet(), fp32_modules=("last",)).eval()
    before = model(x())
    twin = duplicate(model)
    assert type(twin) is type(model)
    assert dtypes_of(twin) == dtypes_of(model)
    assert twin.state_dict()["first.weight"].dtype is torch.float32
    assert torch.equal(twin(x()), before)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert torch.equal(model(x()), before)
    assert torch.equal(twin(x()), twin.shift.float().expand(4, 2))
    restore(twin)
    assert type(twin) is BufferNet
    assert not twin.last._forward_hooks
    assert not twin.last._forward_pre_hooks
    assert len(model.last._forward_hooks) == 1
    assert twin(x()).dtype is model(x()).dtype is torch.float32


@every_copy
def test_own_getstate_and_setstate_are_honoured(duplicate):
    model = converted(CustomState(), "O4").eval()
    twin = duplicate(model).eval()
    assert torch.equal(twin(x()), model(x()))


@every_copy
def test_parameters_that_own_setstate_made_anew_are_cast_again(duplicate):
    twin = duplicate(converted(CustomState()))
    assert twin.first.weight.dtype is LOW
    assert twin(x()).dtype is torch.float32


@every_copy
def test_own_reduce_is_honoured(duplicate):
    twin = duplicate(converted(CustomReduce(3, 2)))
    assert isinstance(twin, CustomReduce)
    assert twin(x()).shape == (4, 2)
    assert twin.weight.dtype is LOW


def test_own_deepcopy_is_honoured_and_its_copy_is_prepared():
    model = converted(OwnDeepCopy(3, 2))
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(twin(x()), model(x()))


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
