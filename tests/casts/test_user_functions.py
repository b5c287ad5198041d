"""Functions that the user wants cast: wrappers, and functions registered in other modules."""

import functools
import threading
import types

import pytest
import torch
from torch import nn

from apex._core.op_table import AutocastSpec, OpTable
from apex._engine.autocast.region import AutocastRegion, active_dtype, casts_off
from apex._engine.autocast.user_functions import UserRegistry, cast_function

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.fixture
def region():
    return AutocastRegion(AutocastSpec(F16, ("cpu",), OpTable.default()))


def dtypes(*args, **kwargs):
    """Returns the dtypes of its tensor arguments, and whether casts are on inside."""
    values = [*args, *kwargs.values()]
    return [v.dtype for v in values if isinstance(v, torch.Tensor)], active_dtype() is not None


def ones(dtype):
    return torch.ones(2, dtype=dtype)


# -- cast_function --------------------------------------------------------------------------------

WANTED = [
    ("low_precision", (F32, BF16), [F16, F16], True),
    ("bfloat16", (F32, F32, F16), [BF16, BF16, BF16], True),
    ("float", (F16, BF16, F32), [F32, F32, F32], False),
    ("promote", (F16, F32), [F32, F32], True),
    ("promote", (F16, BF16), [F32, F32], True),
    ("promote", (F16, F16), [F16, F16], True),
]


@pytest.mark.parametrize(("kind", "given", "wanted", "casts_inside"), WANTED)
def test_each_kind_casts_its_arguments(region, kind, given, wanted, casts_inside):
    args = [ones(dtype) for dtype in given]
    assert region.run(cast_function(dtypes, kind), *args) == (wanted, casts_inside)


@pytest.mark.parametrize("kind", ["low_precision", "bfloat16", "float", "promote"])
def test_wrapper_is_a_plain_call_where_casts_are_off(region, kind):
    fn = cast_function(dtypes, kind)
    assert fn(ones(F32), ones(F16)) == ([F32, F16], False)
    with casts_off():
        assert region.run(fn, ones(F32), ones(F16)) == ([F32, F16], False)


def test_wrapper_casts_nested_and_keyword_tensors_only(region):
    def fn(*args, **kwargs):
        return args, kwargs

    integer = torch.ones(2, dtype=torch.int64)
    (nested, same), kwargs = region.run(
        cast_function(fn, "low_precision"), [ones(F32), (ones(F32),)], integer, x={"a": ones(F32)}
    )
    assert nested[0].dtype is F16
    assert nested[1][0].dtype is F16
    assert same is integer
    assert kwargs["x"]["a"].dtype is F16


def test_the_users_own_autocast_is_off_in_float_functions(region):
    fn = cast_function(lambda x: (x @ x).dtype, "float")
    with torch.autocast("cpu", F16):
        assert fn(torch.ones(2, 2)) is F32
        assert torch.is_autocast_enabled("cpu")


def test_wrapper_works_on_methods(region):
    class Model(nn.Module):
        @staticmethod
        def _kind(x):
            return x.dtype

        def forward(self, x):
            return self._kind(x)

        forward = cast_function(forward, "low_precision")

    assert region.run(Model(), ones(F32)) is F16
    assert region.run(cast_function(Model()._kind, "low_precision"), ones(F32)) is F16


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert grad.dtype is ctx.dtype
        return grad * 2


def test_wrapper_works_on_autograd_functions(region):
    x = ones(F32).requires_grad_()
    out = region.run(cast_function(Double.apply, "low_precision"), x)
    assert out.dtype is F16
    with casts_off():
        out.float().sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


# -- UserRegistry ---------------------------------------------------------------------------------


@pytest.fixture
def module():
    module = types.ModuleType("users")
    module.fn = dtypes
    return module


def registered(holder, name, kind="float"):
    registry = UserRegistry()
    registry.register(holder, name, kind)
    return registry


def test_registered_function_is_replaced_while_applied(region, module):
    registry = registered(module, "fn", "low_precision")
    assert module.fn is dtypes
    registry.apply()
    assert region.run(lambda: module.fn(ones(F32))) == ([F16], True)
    registry.undo()
    assert module.fn is dtypes


def test_sessions_begin_and_end_in_threads_at_once(module):
    registry = registered(module, "fn")

    def turns():
        for _ in range(2000):
            registry.apply()
            registry.undo()

    threads = [threading.Thread(target=turns) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.fn is dtypes


def test_function_registered_in_a_session_is_replaced_until_the_last_one_ends(module):
    registry = UserRegistry()
    registry.apply()
    registry.register(module, "fn", "float")
    ours = module.fn
    assert ours is not dtypes
    registry.apply()
    registry.undo()
    assert module.fn is ours
    registry.undo()
    assert module.fn is dtypes


def test_inherited_method_is_taken_off_the_class_again(region):
    registry = registered(torch.Tensor, "exp2")
    registry.apply()
    assert region.run(lambda: ones(F16).exp2()).dtype is F32
    registry.undo()
    assert "exp2" not in vars(torch.Tensor)
    assert region.run(lambda: ones(F16).exp2()).dtype is F16


def test_class_and_static_methods_are_replaced_in_kind(region):
    class Base:
        @staticmethod
        def plain(x):
            return x.dtype

        @classmethod
        def own(cls, x):
            return cls.__name__, x.dtype

    registry = UserRegistry()
    before = dict(vars(Base))
    for holder, name in ((Base, "plain"), (Base, "own"), (Double, "apply")):
        registry.register(holder, name, "low_precision")
    registry.apply()
    x = ones(F32)
    assert region.run(lambda: (Base.plain(x), Base().plain(x))) == (F16, F16)
    assert region.run(lambda: Base.own(x)) == ("Base", F16)
    assert region.run(lambda: Double.apply(x)).dtype is F16
    registry.undo()
    assert dict(vars(Base)) == before
    assert "apply" not in vars(Double)


def test_users_own_replacement_made_meanwhile_is_left(region, module):
    registry = registered(module, "fn", "low_precision")
    registry.apply()
    ours = module.fn

    def users(x):
        return ours(x)

    module.fn = users
    registry.undo()
    assert module.fn is users
    assert users(ones(F32)) == ([F32], False)


def test_failure_to_replace_puts_the_others_back(module):
    registry = registered(module, "fn")
    registry.register(dict, "fromkeys", "float")  # of a built-in type: cannot be replaced
    with pytest.raises(TypeError):
        registry.apply()
    assert module.fn is dtypes


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda _: cast_function(3, "float"), TypeError, "int 3"),
        (lambda users: registered(users, "missing"), ValueError, "No function 'missing' in users"),
        (lambda users: registered(users, "__name__"), ValueError, "No function '__name__' in use"),
        (lambda users: registered(users, users.fn), TypeError, "got <function"),
    ],
)
def test_only_functions_that_are_there_are_taken(module, call, error, words):
    with pytest.raises(error, match=words):
        call(module)


def test_a_wrapper_of_a_cast_function_stays_when_cast_again(region):
    calls = []
    inner = cast_function(lambda x: x.dtype, "float")

    @functools.wraps(inner)
    def counted(x):
        calls.append(1)
        return inner(x)

    outer = cast_function(counted, "low_precision")
    x = torch.ones(1)
    assert region.run(outer, x) is outer(x) is F32
    assert len(calls) == 2
