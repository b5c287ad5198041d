"""What ``amp.initialize`` makes of a model, and ``amp.restore`` of a prepared one."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from apex.amp import restore
from tests.model.nets import LOW, BufferNet, converted, dtypes_of, x
from tests.support.loops import in_a_thread


def test_parameters_and_buffers_are_cast_but_batch_norm_and_integers():
    assert set(dtypes_of(converted(nn.Linear(2, 2).double(), "O0")).values()) == {torch.float32}
    dtypes = dtypes_of(converted(BufferNet().double()))
    low = {"first.weight", "first.bias", "last.weight", "last.bias", "shift"}
    assert {name for name, dtype in dtypes.items() if dtype is LOW} == low
    assert dtypes["norm.weight"] is dtypes["norm.running_var"] is torch.float32
    assert dtypes["count"] is dtypes["norm.num_batches_tracked"] is torch.int64


def test_parametrized_batch_norm_is_kept_with_all_below():
    model = nn.Sequential(nn.BatchNorm1d(3))
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    converted(model)
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_gradients_are_cast_with_their_parameters():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    converted(model)
    assert model.weight.grad.dtype is LOW
    model(torch.ones(1, 2)).sum().backward()
    restore(model)
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))


def test_forward_set_on_the_object_runs_inside_and_comes_back():
    model = nn.Linear(3, 2)
    original = model.forward
    own = lambda given: original(given) * 0 + given.dtype.itemsize  # noqa: E731
    model.forward = own
    converted(model)
    assert torch.equal(model(x()), torch.full((4, 2), 2.0))
    assert torch.equal(model.forward(x()), torch.full((4, 2), 2.0))
    restore(model)
    assert model.forward is own


def test_forward_set_on_the_object_later_wins_and_stays():
    model = converted(nn.Linear(3, 2))
    inner = model.forward
    model.forward = lambda given: inner(given) + 1
    assert model(x()).dtype is torch.float32
    restore(model)
    assert model(x()).dtype is torch.float32


def test_a_model_prepared_again_runs_the_forward_set_on_the_object():
    model = nn.Linear(3, 2)
    original = model.forward
    model.forward = lambda given: original(given) + 1
    expected = model(x())
    for _ in range(2):
        converted(model, "O0")
    assert torch.equal(model(x()), expected)


def test_a_model_that_cannot_be_prepared_again_stays_as_it_is(monkeypatch):
    model, other = converted(nn.Linear(3, 2), "O4"), nn.LSTM(3, 3)
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        converted([model, other], "O4")
    assert in_a_thread(lambda: model(x()).dtype) is LOW


def test_a_cast_to_the_models_own_dtype_leaves_what_is_in_fp32():
    model = converted(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model.to(LOW)
    assert dtypes_of(model)["0.weight"] is LOW
    assert dtypes_of(model)["1.weight"] is dtypes_of(model)["1.running_mean"] is torch.float32


def test_16_bit_weights_take_the_memory_format_of_a_move():
    model = converted(nn.Conv2d(2, 2, 2))
    model.to(memory_format=torch.channels_last)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_class_put_on_top_later_outlives_restore():
    model = converted(nn.Linear(3, 2))
    parametrizations.weight_norm(model)
    restore(model)
    assert type(model).__bases__ == (nn.Linear,)
    assert parametrize.is_parametrized(model)
    assert model(x()).dtype is torch.float32


def test_lstm_keeps_its_flat_weights():
    model = converted(nn.LSTM(3, 2))
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    output, (hidden, _) = model(x().unsqueeze(1))
    assert output.dtype is hidden.dtype is torch.float32


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_slice_of_a_model_is_stored_as_a_plain_one_and_converted(level):
    part = converted(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), level)[1:]
    assert type(pickle.loads(pickle.dumps(part))) is nn.Sequential
    converted(part, level)
    restore(part)
    assert type(part) is nn.Sequential


class Guarded(nn.Linear):
    """Lets nobody set an attribute once it is built."""

    def __setattr__(self, name, value):
        if self.__dict__.get("done"):
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_a_model_that_guards_its_attributes_is_converted_copied_and_restored():
    model = Guarded(3, 2)
    model.done = True
    converted(model)
    assert copy.deepcopy(model)(x()).dtype is torch.float32
    restore(model)
    assert type(model) is Guarded


class Stubborn(torch.Tensor):
    """Refuses to be cast."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            raise ArithmeticError("stubborn")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_failing_cast_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].weight = nn.Parameter(torch.ones(1, 3).as_subclass(Stubborn))
    model[0](x()).sum().backward()
    value, grad = model[0].weight.data.clone(), model[0].weight.grad
    with pytest.raises(ArithmeticError, match="stubborn"):
        converted(model)
    assert type(model) is nn.Sequential
    assert torch.equal(model[0].weight, value)
    assert model[0].weight.dtype is torch.float32
    assert model[0].weight.grad is grad
    assert model.__dict__.keys() == nn.Sequential().__dict__.keys()


class Proxy:
    """Stands for a module, and doubles what it gives, as the models of some libraries do."""

    def __init__(self, module):
        self.module = module

    __class__ = property(lambda self: type(self.__dict__["module"]))

    def __getattr__(self, name):
        return getattr(self.__dict__["module"], name)

    def __call__(self, x):
        return self.module(x) * 2


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
def test_a_proxy_of_a_module_is_prepared_where_weights_stay_fp32_and_else_refused(level):
    model = Proxy(nn.Linear(3, 2))
    if level == "O5":
        with pytest.raises(TypeError, match="Pass the module inside it"):
            converted(model, level)
        return
    assert converted(model, level) is model
    dtype = {"O0": torch.float32, "O1": torch.float16, "O4": LOW}[level]
    assert model(x()).dtype is dtype
    restore(model)
    assert model(x()).dtype is torch.float32


def all_subclasses(cls):
    direct = cls.__subclasses__()
    return {*direct, *(found for each in direct for found in all_subclasses(each))}


def test_walks_through_all_subclasses_find_each_class_once(level):
    class Base(nn.Linear):
        pass

    class Derived(Base):
        pass

    model = converted(Derived(1, 1), level)
    assert all_subclasses(Base) == {Derived}
    assert Derived in all_subclasses(nn.Module)
    restore(model)


def test_a_clone_outlives_the_model_whose_attributes_it_shares(level):
    model = converted(nn.Linear(3, 2), level)
    clone = model.__new__(type(model))  # as learn2learn makes one
    clone.__dict__ = dict(model.__dict__)
    clone._parameters = {name: param.clone() for name, param in model._parameters.items()}
    expected = model(x())
    del model
    gc.collect()
    assert torch.equal(clone(x()), expected)


def test_generated_class_goes_with_its_models():
    class Local(nn.Linear):
        pass

    converted(Local(1, 1))
    gc.collect()
    assert Local.__subclasses__() == []


@pytest.mark.parametrize("of", [copy.deepcopy, pickle.dumps])
def test_attributes_that_are_copied_without_their_model_are_an_error_that_names_the_way(level, of):
    model = converted(nn.Sequential(nn.Linear(3, 2)), level)
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(model\) is a plain fp32 model"):
        of(model.__dict__)
