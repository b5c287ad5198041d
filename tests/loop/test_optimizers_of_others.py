"""Optimizers of others: with tables, arguments, hooks or wrappers of their own, or no groups."""

import abc
from collections import deque
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from apex import amp
from apex._core.undo import Undo
from apex.integrations import scales
from tests.support import loops
from tests.support.wrapping_optimizers import Lookahead


class Options:
    """Options by the id of their parameter, as those of bitsandbytes."""

    def __init__(self, params):
        self.by_id = {id(param): 0.5 for param in params}


class Holder(nn.Module):
    """A module of the optimizer's own package."""


class Order(NamedTuple):
    first: nn.Parameter
    before: list[nn.Parameter]


class Tables(torch.optim.SGD):
    """Reads its options from tables that it made before ``amp.initialize``."""

    def __init__(self, params):
        params = [*params]
        super().__init__(params, lr=0.1)
        self.excluded = {id(params[0])}
        self.order = Order(params[1], [params[0]])
        self.queue = deque(params)
        self.options = Options(params)
        self.part = torch.optim.SGD(params, lr=0.1)
        self.holder = Holder()
        self.holder.weight = params[0]
        self.named = [(self.holder, "weight", {})]
        self.unnamed = (self.holder, params[0])

    def step(self, closure=None):
        for param in self.queue:
            param.grad *= self.options.by_id[id(param)] * (id(param) not in self.excluded)
        assert self.order.before[0] is self.part.param_groups[0]["params"][0] is self.queue[0]
        assert getattr(*self.named[0][:2]) is self.unnamed[1] is self.queue[0]
        assert self.unnamed[0] is self.holder
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_tables_by_parameters_and_their_ids_are_carried_over_and_back(level):
    model, optimizer = loops.plain_pair(Tables)
    tables = optimizer.excluded, optimizer.queue, optimizer.options.by_id
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    before = loops.masters(optimizer)
    loops.train_step(model, optimizer, *loops.batch())
    pairs = zip(before, loops.masters(optimizer), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [True, False, False, False]
    params = [*model.parameters()]
    assert optimizer.holder.weight is params[0]
    amp.restore(model, optimizer)
    assert optimizer.excluded == {id(params[0])}
    assert [*optimizer.options.by_id] == [*map(id, params)]
    assert all(map(lambda a, b: a is b, optimizer.queue, params))
    assert optimizer.named[0][0].weight is params[0]
    assert tables == (optimizer.excluded, optimizer.queue, optimizer.options.by_id)
    assert optimizer.state["steps"] == 1


class Takes(torch.optim.SGD):
    def step(self, closure=None, factor=1.0, *, param=None):
        for each in self.param_groups[0]["params"]:
            if param is None or each is param:
                each.grad *= factor
        return super().step(closure)


class TakesNoClosure(Takes):
    def step(self, *, factor=1.0):
        return super().step(None, factor)


TAKEN = {
    "all": (Takes, lambda step, param: step(None, 0.0, param=param), [True] + [False] * 3),
    "by position": (Takes, lambda step, _: step(None, 0.0), [True] * 4),
    "by name": (Takes, lambda step, _: step(factor=0.0), [True] * 4),
    "no closure": (TakesNoClosure, lambda step, _: step(factor=0.0), [True] * 4),
}


@pytest.mark.parametrize(("own_class", "call", "stays"), TAKEN.values(), ids=TAKEN)
def test_what_a_step_takes_is_passed_on_and_a_parameter_as_its_master(
    level, own_class, call, stays
):
    model, optimizer = loops.prepared(level, lambda p: own_class(p, lr=0.1), loss_scale=1.0)
    before = loops.masters(optimizer)
    loops.backward(model, optimizer, *loops.batch())
    call(optimizer.step, model[0].weight)
    after = loops.masters(optimizer)
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == stays


@pytest.mark.parametrize("make", [loops.sgd, lambda p: Lookahead(loops.sgd(p))])
def test_a_step_set_on_the_object_before_runs_inside_amps(level, make):
    model = loops.net()
    optimizer = make(model.parameters())
    own_step = optimizer.step
    calls = []
    optimizer.step = lambda closure=None: calls.append(own_step(closure))
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    loops.train(model, optimizer, data=loops.batches(3, overflow_at={1}))
    assert len(calls) == 2
    amp.restore(model, optimizer)
    loops.plain_step(model, optimizer, *loops.batch())
    assert len(calls) == 3


class InHooks(torch.optim.Optimizer):
    """Steps in hooks, without torch's constructor, as LOMO and torchao's CPUOffloadOptimizer."""

    def __init__(self, params):
        self.param_groups = [{"params": [*params]}]

        @torch.no_grad()
        def update(param):
            param.sub_(param.grad, alpha=0.1)
            self.steps = getattr(self, "steps", 0) + 1

        for param in self.param_groups[0]["params"]:
            param.register_post_accumulate_grad_hook(update)

    def step(self, closure=None):
        pass

    def zero_grad(self, set_to_none=True):
        for param in self.param_groups[0]["params"]:
            param.grad = None


@pytest.mark.parametrize("level", loops.LEVELS)
def test_an_optimizer_that_steps_in_hooks_works_where_gradients_and_weights_are_fp32(level):
    model, optimizer = loops.plain_pair(InHooks)
    options = {"opt_level": level, "verbosity": 0}
    if level in ("O1", "O2", "O5"):
        with loops.nothing_changes(model), pytest.raises(RuntimeError, match="opt_level 'O4'"):
            amp.initialize(model, optimizer, **options)
        return
    amp.initialize(model, optimizer, **options)
    loops.train_step(model, optimizer, *loops.batch())
    assert optimizer.steps == 4
    amp.restore(model, optimizer)  # else the casts stay until Python collects the hooks


class SecondOrder(torch.optim.SGD):
    """Differentiates gradients, as AdaHessian."""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        torch.autograd.grad([p.grad.sum() for p in params], params, retain_graph=True)
        return super().step(closure)


def test_a_script_may_have_its_optimizer_and_hooks_of_others_in_one_file(level):
    model, optimizer = loops.plain_pair(SecondOrder)
    for param in model.parameters():
        param.register_hook(lambda grad: grad.mul(1.0))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("level", loops.MIXED)
def test_an_optimizer_of_second_order_works_without_masters(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, optimizer = loops.prepared(level, SecondOrder, model, loss_scale=1.0)
    with amp.scale_loss(loops.loss_of(model, *loops.batch()), optimizer) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    if level in loops.WITH_MASTERS:
        with pytest.raises(RuntimeError, match=r"used in the graph(?s:.*)needs opt_level 'O4'"):
            optimizer.step()
    else:
        optimizer.step()
    amp.restore(model, optimizer)


def test_steps_leave_no_hooks(level):
    _model, optimizer = loops.trained(level)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("an error of its own")


def test_an_error_of_a_step_has_its_own_words(level):
    _model, optimizer = loops.prepared(level, lambda params: Fails(params, lr=0.1))
    with pytest.raises(RuntimeError, match=r"^an error of its own$"):
        optimizer.step()


@pytest.mark.parametrize("level", loops.MIXED)
def test_an_optimizer_without_groups_is_taken_where_nothing_is_unscaled(level):
    model, optimizer = loops.net(), MagicMock(spec=torch.optim.Optimizer)
    options = {"opt_level": level, "verbosity": 0}
    if level in loops.WITH_MASTERS:
        with loops.nothing_changes(model), pytest.raises(TypeError, match="without param_groups"):
            amp.initialize(model, optimizer, loss_scale=1.0, **options)
        return
    amp.initialize(model, optimizer, loss_scale=1.0, **options)
    loops.backward(model, optimizer, *loops.batch())
    for _ in range(2):
        optimizer.step()
    assert model[0].weight.grad is not None
    amp.restore(model, optimizer)


class Around:
    """An optimizer in an attribute ``base``, as schedulefree's wrapper: reads gradients later."""

    def __init__(self, base):
        self.base = base

    @property
    def param_groups(self):
        return self.base.param_groups

    def zero_grad(self):
        self.base.zero_grad()

    @torch.no_grad()
    def step(self):
        self.base.step()
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1)


@loops.every(before=[False, True], level=loops.MIXED)
def test_a_wrapper_by_the_name_of_base_steps_after_its_optimizer(level, before):
    pairs = []
    for rate, wraps in ((0.1, True), (0.2, False)):
        model = loops.net()
        optimizer = loops.sgd(model.parameters(), lr=rate)
        given = Around(optimizer) if wraps and before else optimizer
        amp.initialize(model, given, opt_level=level, loss_scale=1.0, verbosity=0)
        given = Around(optimizer) if wraps else optimizer
        loops.train(model, given)
        pairs.append((model, optimizer))
    values = [loops.masters(optimizer) for _, optimizer in pairs]
    torch.testing.assert_close(*values)


class Accelerated(torch.optim.Optimizer):
    """An optimizer without its constructor around another, as ``accelerator.prepare`` returns."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Plain:
    """A wrapper that is no optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


def twice(optimizer):
    return Accelerated(Accelerated(optimizer))


@pytest.mark.parametrize("wrap", [Accelerated, Plain, twice])
def test_a_wrapped_optimizer_trains_and_skips_as_the_one_inside(level, wrap):
    pairs = [loops.prepared(level, loops.OPTIMIZERS["SGD"], loss_scale="dynamic") for _ in range(2)]
    for x, y in loops.batches(4, overflow_at={2}):
        loops.train_step(*pairs[0], x, y)
        loops.train_step(pairs[1][0], wrap(pairs[1][1]), x, y)
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in pairs))
    first, second = (scales.state_dict(optimizer) for _, optimizer in pairs)
    assert first == second


class Unconstructed(torch.optim.Optimizer):
    """An SGD that never calls torch's constructor, as timm's Lookahead of 2021."""

    def __init__(self, params):
        self.base = loops.sgd(params)
        self.param_groups, self.state, self.defaults = self.base.param_groups, {}, {}

    def step(self, closure=None):
        return self.base.step(closure)


class Abstract(abc.ABC, torch.optim.SGD):
    """Its first base has no attributes."""


def abstract(params):
    return Abstract(params, lr=0.1)


def test_an_optimizer_without_torchs_constructor_or_abstract_first_trains(level):
    made = [loops.prepared(level, make) for make in (loops.sgd, Unconstructed, abstract)]
    for x, y in loops.batches(3):
        for model, optimizer in made:
            loops.train_step(model, optimizer, x, y)
    expected, *found = (loops.masters(optimizer) for _, optimizer in made)
    assert all(loops.same(masters, expected) for masters in found)
    amp.restore(*made[2])
    assert type(made[2][1]) is Abstract


class ClearsOne(torch.optim.SGD):
    """As optimi's, which clear one parameter's gradient once it is stepped."""

    def zero_grad(self, set_to_none=True, param=None):
        param.grad = None


def test_a_zero_grad_that_takes_a_parameter_clears_its_gradient_alone(level):
    model, optimizer = loops.prepared(level, lambda params: ClearsOne(params, lr=0.1))
    loops.backward(model, optimizer, *loops.batch())
    optimizer.zero_grad(param=model[0].weight)
    cleared = [param.grad is None for param in model.parameters()]
    assert cleared == [True, False, False, False]


class ClearsEverySecondTime(torch.optim.SGD):
    """As wrappers that accumulate the gradients of two passes."""

    calls = 0

    def zero_grad(self, set_to_none=True):
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)
        self.calls += 1


def test_gradients_that_an_own_zero_grad_leaves_are_added_to(level):
    kinds = loops.sgd, lambda params: ClearsEverySecondTime(params, lr=0.1)
    made = [loops.prepared(level, kind) for kind in kinds]
    (model, optimizer), own = made
    for x, y in loops.batches(4):
        for _ in range(2):
            own[1].zero_grad()
            loops.backward(*own, x, y)
            loops.backward(model, optimizer, x, y)
        for _, stepped in made:
            stepped.step()
        optimizer.zero_grad()
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in made))


class Grouped(torch.optim.SGD):
    """Splits what it is given into groups."""

    def add_param_group(self, param_group, rates=(0.1,)):
        for lr, param in zip(rates, param_group["params"], strict=False):
            super().add_param_group({"params": [param], "lr": lr})


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_an_add_param_group_with_arguments_of_its_own_may_add_several(level):
    model, optimizer = loops.prepared(level, lambda params: Grouped([*params][:1], lr=0.1))
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": [*model[-1].parameters()]}, rates=[0.2, 0.3])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}
    assert model[-1].weight.dtype is model[-1].bias.dtype is model[0].weight.dtype


@pytest.mark.parametrize("name", ["step", "zero_grad", "add_param_group"])
def test_a_method_wrapped_on_the_class_runs_once_inside_amps(level, name):
    classes = [type("SGD", (torch.optim.SGD,), {}) for _ in range(2)]
    made = [loops.prepared(level, own, loss_scale=128.0) for own in classes]
    cls = type(made[1][1])
    original, calls = getattr(cls, name), []

    def wrapper(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    setattr(cls, name, wrapper)
    for x, y in loops.batches(2):
        for model, optimizer in made:
            loops.train_step(model, optimizer, x, y)
    for _, optimizer in made:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert calls == [name] * (1 if name == "add_param_group" else 2)
    assert getattr(cls, name) is wrapper
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in made))


def test_an_undo_that_fails_hides_neither_the_error_nor_the_other_undos(caplog):
    undone = []

    def change():
        with Undo() as undo:
            undo.callback(undone.append, 1)
            undo.callback(undone.index, 2)  # a ValueError
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        change()
    assert undone == [1]
    assert "could not be undone" in caplog.text


class Epochs(torch.optim.SGD):
    """Its ``step`` takes no closure first, as the LARS of SimCLR's ports."""

    def step(self, epoch=None, closure=None):
        self.epoch = epoch
        return super().step(closure)


CALLS = {
    "by position": lambda optimizer, closure: optimizer.step(3, closure),
    "by name": lambda optimizer, closure: optimizer.step(3, closure=closure),
    "both by name": lambda optimizer, closure: optimizer.step(closure=closure, epoch=3),
}


@loops.every(level=loops.LEVELS, call=CALLS)
def test_a_closure_is_found_where_the_call_has_it(level, call):
    options = {"model": loops.Weights("a"), "loss_scale": 1.0}
    model, optimizer = loops.prepared(level, lambda params: Epochs(params, lr=0.5), **options)

    def closure():
        optimizer.zero_grad()
        loss = model(a=0.5)
        loops.scaled_backward(loss, optimizer)
        return loss

    CALLS[call](optimizer, closure)
    assert optimizer.epoch == 3
    optimizer.step(4)
    assert optimizer.epoch == 4
    (master,) = amp.master_params(optimizer)
    assert master.tolist() == [0.5, 0.5]
