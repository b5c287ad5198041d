"""The class that a bound optimizer gets."""

import copy
import gc
import pickle

import pytest
import torch

from apex._engine.optimizer.binding import Binding
from apex._engine.optimizer.optimizer_class import (
    AmpOptimizer,
    bind_class,
    binding_of,
    generated_class,
    own_class,
    unbind_class,
)


class OwnSGD(torch.optim.SGD):
    """A user's optimizer."""


def bound(kind=OwnSGD, dtype=torch.bfloat16, **options):
    param = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = kind([param], lr=0.5, **options)
    binding = Binding(optimizer, master_weights=True)
    bind_class(optimizer, binding, AmpOptimizer)
    return optimizer, param


def test_a_bound_optimizer_is_still_of_its_class_and_shows_its_name():
    optimizer, _ = bound()
    assert isinstance(optimizer, OwnSGD)
    kind = type(optimizer)
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        OwnSGD.__name__,
        OwnSGD.__qualname__,
        OwnSGD.__module__,
        OwnSGD.__doc__,
    )


def test_two_optimizers_of_one_class_share_their_generated_class():
    assert type(bound()[0]) is type(bound()[0])


def test_generated_classes_go_when_nobody_uses_them():
    class Passing(torch.optim.SGD):
        pass

    generated_class(AmpOptimizer, Passing)
    gc.collect()
    assert Passing.__subclasses__() == []


def test_the_own_class_is_found_from_the_generated_one():
    assert own_class(generated_class(AmpOptimizer, OwnSGD)) is OwnSGD


def test_unbinding_gives_the_own_class_back():
    optimizer, _ = bound()
    unbind_class(optimizer)
    assert type(optimizer) is OwnSGD
    assert binding_of(optimizer) is None


def test_a_plain_optimizer_has_no_binding():
    assert binding_of(OwnSGD([torch.nn.Parameter(torch.ones(1))])) is None


def test_arguments_of_a_users_step_are_passed_on():
    class Scaled(torch.optim.SGD):
        def step(self, closure=None, *, factor=1.0):
            self.factor = factor
            return super().step(closure)

    optimizer, _ = bound(Scaled)
    optimizer.step(factor=3.0)
    assert optimizer.factor == 3.0


def test_the_result_of_a_closure_is_returned():
    optimizer, param = bound()
    closure_loss = torch.tensor(5.0)

    def closure():
        param.grad = torch.ones_like(param)
        return closure_loss

    assert optimizer.step(closure) is closure_loss
    assert torch.equal(param.detach(), torch.full((2,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("kwargs", [{}, {"set_to_none": True}])
def test_zero_grad_clears_by_default_to_none(kwargs):
    optimizer, param = bound()
    param.grad = torch.ones_like(param)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.zero_grad(**kwargs)
    assert param.grad is None
    assert optimizer.param_groups[0]["params"][0].grad is None


@pytest.mark.parametrize("give", [lambda p: p, lambda p: [p], lambda p: iter([p])])
def test_an_added_group_may_be_a_parameter_or_any_iterable(give):
    optimizer, _ = bound()
    added = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": give(added)})
    (master,) = optimizer.param_groups[1]["params"]
    assert master.dtype is torch.float32
    assert master.shape == added.shape


@pytest.mark.parametrize("make", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_is_bound_to_itself(make):
    optimizer, _ = bound()
    copied = make(optimizer)
    assert type(copied) is type(optimizer)
    assert binding_of(copied) is not binding_of(optimizer)
    assert binding_of(copied).optimizer is copied


def test_no_generated_name_is_in_a_pickle():
    stored = pickle.dumps(bound()[0])
    optimizer = pickle.loads(stored)
    unbind_class(optimizer)
    assert type(optimizer) is OwnSGD
    assert b"generated" not in stored


def test_a_copy_of_an_unbound_optimizer_is_plain():
    optimizer, _ = bound()
    unbind_class(optimizer)
    assert type(copy.deepcopy(optimizer)) is OwnSGD


def test_another_optimizer_of_the_class_steps_and_is_bound():
    kind = type(bound()[0])
    for _ in range(2):
        param = torch.nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        optimizer = kind([param], lr=0.5)
        optimizer.step()
        assert param.tolist() == [0.5, 0.5]
        bind_class(optimizer, Binding(optimizer, master_weights=True), AmpOptimizer)
        assert type(optimizer) is kind


class SuperOfItsClass(torch.optim.SGD):
    """Calls its base as Horovod's DistributedOptimizer does."""

    def step(self, closure=None):
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args, **kwargs):
        return super(self.__class__, self).zero_grad(*args, **kwargs)


def test_an_optimizer_may_call_the_base_of_its_class():
    optimizer, param = bound(SuperOfItsClass)
    (master,) = optimizer.param_groups[0]["params"]
    master.grad = torch.ones(2)
    optimizer.step()
    assert param.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    assert master.grad is None


def test_a_step_function_kept_by_a_scheduler_does_not_keep_the_optimizer():
    optimizer, _ = bound()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = optimizer.step
    del optimizer
    gc.collect()
    with pytest.raises((RuntimeError, AttributeError)):
        step()


@pytest.mark.parametrize("bound_later", [True, False])
def test_a_scheduler_sees_the_steps(bound_later):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = OwnSGD([param], lr=0.5)
    if bound_later:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    binding = Binding(optimizer, master_weights=True)
    bind_class(optimizer, binding, AmpOptimizer)
    if not bound_later:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    assert optimizer._opt_called


class Watched(torch.nn.Parameter):
    """A parameter that overrides torch's functions."""

    calls = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += (func,)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("beside_master", [True, False])
def test_a_parameter_that_overrides_functions_sees_the_step(beside_master):
    watched = Watched(torch.ones(2))
    low = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    params = [low, watched] if beside_master else [watched]
    optimizer = torch.optim.SGD(params, lr=0.5, foreach=False)
    bind_class(optimizer, Binding(optimizer, master_weights=True), AmpOptimizer)
    watched.grad = low.grad = None
    watched.grad = torch.ones(2)
    Watched.calls = ()
    optimizer.step()
    assert torch.Tensor.add_ in Watched.calls
    assert watched.tolist() == [0.5, 0.5]
