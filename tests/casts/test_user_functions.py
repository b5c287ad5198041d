"""Functions that the user wants cast: wrappers, and functions registered in other modules."""

import copy
import functools
import pickle
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.loops import prepared, product

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def session():
    """Casts to fp16 are on."""
    return prepared("O1")


def dtypes(*args, **kwargs):
    """Returns the dtypes of its tensor arguments, and whether casts are on inside."""
    return [value.dtype for value in (*args, *kwargs.values())], product() is F16


def ones(dtype):
    return torch.ones(2, dtype=dtype)


# -- wrappers -------------------------------------------------------------------------------------


KINDS = [
    (amp.half_function, (F32, BF16), [F16, F16], True),
    (amp.bfloat16_function, (F32, F32, F16), [BF16, BF16, BF16], True),
    (amp.float_function, (F16, BF16, F32), [F32, F32, F32], False),
    (amp.promote_function, (F16, F32), [F32, F32], True),
    (amp.promote_function, (F16, BF16), [F32, F32], True),
    (amp.promote_function, (F16, F16), [F16, F16], True),
]


@pytest.mark.parametrize(("wrap", "given", "wanted", "casts_inside"), KINDS)
def test_each_kind_casts_its_arguments_where_casts_are_on(
    wrap, given, wanted, casts_inside, module
):
    args = [ones(dtype) for dtype in given]
    assert wrap(dtypes)(*args) == (wanted, casts_inside)
    with amp.disable_casts():
        assert wrap(dtypes)(*args) == ([*given], False)
    getattr(amp, f"register_{wrap.__name__}")(module, "fn")
    assert module.fn(*args) == (wanted, casts_inside)


def test_a_wrapper_casts_nested_and_keyword_tensors_only():
    integer = torch.ones(2, dtype=torch.int64)
    given = [ones(F32), (ones(F32),)], integer
    (nested, same), kwargs = amp.half_function(lambda *args, **kwargs: (args, kwargs))(
        *given, x={"a": ones(F32)}
    )
    assert nested[0].dtype is nested[1][0].dtype is kwargs["x"]["a"].dtype is F16
    assert same is integer


def test_the_users_own_autocast_is_off_in_float_functions():
    fn = amp.float_function(lambda x: (x @ x).dtype)
    with amp.disable_casts(), torch.autocast("cpu", F16):
        assert fn(torch.ones(2, 2)) is F32
        assert torch.is_autocast_enabled("cpu")


def test_a_wrapper_works_on_methods():
    class Model(nn.Module):
        @amp.half_function
        def forward(self, x):
            return x.dtype

        def of(self, x):
            return x.dtype

    assert Model()(ones(F32)) is amp.half_function(Model().of)(ones(F32)) is F16

    def of_tensor(self):
        return self.dtype

    assert amp.half_function(of_tensor)(ones(F32)) is F16


class Weighted(nn.Linear):
    def forward(self, x):
        return x.dtype, self.weight.detach().mean().item()


def from_wrapper(part):
    part.forward = amp.half_function(part.forward)


def from_registry(part):
    amp.register_half_function(part, "forward")


@pytest.mark.parametrize("cast", [from_wrapper, from_registry])
def test_a_copy_of_an_object_with_a_cast_method_calls_its_own(cast):
    net = nn.Sequential(Weighted(2, 2))
    cast(net[0])
    copied = copy.deepcopy(net)
    pickled = pickle.loads(pickle.dumps(net))
    nn.init.zeros_(net[0].weight)
    nn.init.ones_(copied[0].weight)
    nn.init.ones_(pickled[0].weight)
    assert net(ones(F32)) == (F16, 0.0)
    assert copied(ones(F32)) == (F16, 1.0)
    assert pickled(ones(F32)) == (F32, 1.0)  # the method of its class


@dataclass
class Boxes:
    corners: torch.Tensor

    @amp.half_function
    def shift(self, offset):
        self.corners = self.corners + offset.float()
        return self, offset.dtype

    def grow(self, factor):
        self.corners = self.corners * factor.float()
        return self, factor.dtype


class Bank(dict):
    @amp.half_function
    def add(self, name, value):
        self[name] = value


def test_a_method_changes_its_own_object_and_no_copy():
    boxes = Boxes(ones(F32))
    moved, dtype = boxes.shift(ones(F32))
    grown, _ = amp.half_function(boxes.grow)(ones(F32))
    assert moved is grown is boxes
    assert (boxes.corners.tolist(), dtype) == ([2.0, 2.0], F16)
    bank = Bank(old=ones(F32))
    bank.add("new", ones(F32))
    assert [bank["old"].dtype, bank["new"].dtype] == [F32, F16]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert grad.dtype is ctx.dtype
        return grad * 2


def test_a_wrapper_works_on_autograd_functions():
    x = ones(F32).requires_grad_()
    out = amp.half_function(Double.apply)(x)
    assert out.dtype is F16
    out.float().sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_a_wrapper_of_a_cast_function_stays_when_cast_again():
    calls = []
    inner = amp.float_function(lambda x: x.dtype)

    @functools.wraps(inner)
    def counted(x):
        calls.append(1)
        return inner(x)

    assert amp.half_function(counted)(ones(F32)) is F32
    assert calls == [1]


# -- registered functions -------------------------------------------------------------------------


@pytest.fixture
def module():
    module = types.ModuleType("users")
    module.fn = dtypes
    return module


def test_a_registered_function_is_replaced_until_the_last_session_ends(session, module):
    amp.register_half_function(module, "fn")
    ours = module.fn
    assert ours(ones(F32)) == ([F16], True)
    second = prepared("O4")
    amp.restore(*session)
    assert module.fn is ours
    amp.restore(*second)
    assert module.fn is dtypes
    third = prepared("O1")
    assert module.fn(ones(F32)) == ([F16], True)
    amp.restore(*third)
    assert module.fn is dtypes


def test_class_static_and_inherited_methods_are_replaced_in_kind(session):
    class Base:
        @staticmethod
        def plain(x):
            return x.dtype

        @classmethod
        def own(cls, x):
            return cls.__name__, x.dtype

    before = dict(vars(Base))
    for holder, name in ((Base, "plain"), (Base, "own"), (Double, "apply"), (torch.Tensor, "exp2")):
        amp.register_half_function(holder, name)
    x = ones(F32)
    assert Base.plain(x) is Base().plain(x) is Double.apply(x).dtype is x.exp2().dtype is F16
    assert Base.own(x) == ("Base", F16)
    amp.restore(*session)
    assert dict(vars(Base)) == before
    assert "apply" not in vars(Double)
    assert "exp2" not in vars(torch.Tensor)


class Triple(Double):
    @staticmethod
    def forward(ctx, x):
        return x * 3


class Holder:
    log = torch.log
    act = nn.ReLU()

    @classmethod
    def made(cls):
        return cls


class Other(Holder):
    pass


def test_a_replacement_binds_as_the_original_does():
    amp.register_half_function(Double, "apply")
    for name in ("log", "act", "made"):
        amp.register_half_function(Holder, name)
    x = ones(F32)
    assert [Double.apply(x).tolist(), Triple.apply(x).tolist()] == [[2.0, 2.0], [3.0, 3.0]]
    assert [Holder.made(), Other.made(), Other().made()] == [Holder, Other, Other]
    for holder in (Holder, Holder()):
        assert holder.log(x).dtype is F32  # in fp32, at O1
        assert holder.act(x).dtype is F16


def test_a_class_is_not_replaced(caplog):
    users = types.SimpleNamespace(Softmax=nn.Softmax)
    amp.register_float_function(users, "Softmax")
    assert users.Softmax is nn.Softmax
    assert "Softmax is a class" in caplog.text


def test_a_users_own_replacement_made_meanwhile_is_left(session, module):
    amp.register_half_function(module, "fn")
    ours = module.fn
    module.fn = users = lambda x: ours(x)  # noqa: PLW0108
    amp.restore(*session)
    assert module.fn is users
    assert users(ones(F32)) == ([F32], False)


def test_failure_to_replace_puts_the_others_back(session, module):
    amp.restore(*session)
    module.missing_later = dtypes
    amp.register_float_function(module, "fn")
    amp.register_float_function(module, "missing_later")
    assert module.fn is dtypes
    del module.missing_later
    with pytest.raises(AttributeError):
        prepared("O1")
    assert module.fn is dtypes


class Slots:
    __slots__ = ("fn",)


@pytest.mark.parametrize("on", [True, False])
def test_a_function_that_cannot_be_replaced_is_refused_at_once(session, on):
    if not on:
        amp.restore(*session)
    slots = Slots()
    slots.fn = dtypes
    for holder, name in ((dict, "fromkeys"), (slots, "fn")):
        with pytest.raises(ValueError, match=f"{name} cannot be replaced .* = amp.half_function"):
            amp.register_half_function(holder, name)
    prepared("O4")


NO_FUNCTIONS = [
    (lambda _: amp.float_function(3), TypeError, "int 3"),
    (lambda users: (users, "missing"), ValueError, "No function 'missing' in users"),
    (lambda users: (users, "__name__"), ValueError, "No function '__name__' in use"),
    (lambda users: (users, users.fn), ValueError, "No function <function"),
]


@pytest.mark.parametrize(("call", "error", "words"), NO_FUNCTIONS)
def test_only_functions_that_are_there_are_taken(module, call, error, words):
    with pytest.raises(error, match=words):
        amp.register_float_function(*call(module))
