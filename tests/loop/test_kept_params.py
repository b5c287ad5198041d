"""Masters for optimizers inside another, and as keys."""

import copy
import functools

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from apex import amp
from tests.support import loops

level = loops.at_levels(*loops.WITH_MASTERS)
adam = functools.partial(Adam, lr=0.1)


class Container(Optimizer):
    """Optimizers as one; each has groups of its own (torchtitan's OptimizersContainer)."""

    def __init__(self, params, make=lambda params: SGD(params, lr=0.1, momentum=0.9)):
        params = list(params)
        super().__init__(params, {})
        self.optimizers = [make(params[:2]), make(params[2:])]

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def inner(self):
        groups = [group for each in self.optimizers for group in each.param_groups]
        return [param for group in groups for param in group["params"]]


def test_optimizers_inside_another_step_masters_and_skip(level):
    model, optimizer = loops.prepared(level, Container, loss_scale="dynamic")
    before = loops.masters(optimizer)
    loops.train_step(model, optimizer, *loops.overflowing())
    assert loops.same(loops.masters(optimizer), before)
    assert not any(each.state for each in optimizer.optimizers)
    loops.train_step(model, optimizer, *loops.batch())
    other = loops.prepared(level, lambda p: SGD(p, lr=0.1, momentum=0.9))
    loops.train_step(*other, *loops.batch())
    assert loops.same(dict(model.state_dict()), dict(other[0].state_dict()))
    assert all(a is b for a, b in zip(optimizer.inner(), amp.master_params(optimizer), strict=True))
    amp.restore(model, optimizer)
    assert all(a is b for a, b in zip(optimizer.inner(), model.parameters(), strict=True))


@loops.every(arrives=[torch.float32, torch.bfloat16], level=["O2", "O4", "O5"])
def test_optimizers_inside_another_continue_from_their_state(level, arrives):
    pairs = []
    for make in (lambda p: Container(p, lambda own: Adam(own, lr=0.01)), loops.OPTIMIZERS["Adam"]):
        model = loops.net().to(arrives)
        optimizer = make(model.parameters())
        for x, y in loops.batches(2):
            loops.plain_step(model, optimizer, x.to(arrives), y)
        pairs.append((model, optimizer))
    for pair in pairs:
        amp.initialize(*pair, opt_level=level, verbosity=0)
        loops.train_step(*pair, *loops.batch(seed=3))
    assert loops.same(*(dict(model.state_dict()) for model, _ in pairs))


def test_in_dicts_and_sets_a_master_is_its_parameter(level):
    model, optimizer = loops.trained(level, loops.fused_adamw_of)
    params, masters = list(model.parameters()), list(amp.master_params(optimizer))
    names = {param: name for name, param in model.named_parameters()}
    assert [names[master] for master in masters] == list(dict(model.named_parameters()))
    assert set(params) == set(masters)
    assert params[0] in dict.fromkeys(masters)
    assert params[0] in optimizer.state
    for param, master in zip(params, masters, strict=True):
        assert optimizer.state[param] is optimizer.state[master]
        assert (master == master.detach()).all()
        assert not (master == master.detach() + 1).any()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})


def states_like(params):
    return [
        {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
        for param in params
    ]


def test_state_that_a_script_puts_under_the_models_parameters_is_the_masters(level):
    model, optimizer = loops.prepared(level, adam)
    other = loops.prepared(level, adam)
    params = list(model.parameters())
    optimizer.state.update(zip(params, states_like(amp.master_params(optimizer)), strict=True))
    copied = copy.deepcopy(optimizer)
    assert sorted(copied.state_dict()["state"]) == list(range(len(params)))
    assert sorted(optimizer.state_dict()["state"]) == list(range(len(params)))
    for pair in ((model, optimizer), other):
        loops.train_step(*pair, *loops.batch(seed=3))
    assert loops.same(*(dict(pair[0].state_dict()) for pair in ((model, optimizer), other)))


def test_state_like_the_models_16_bit_parameters_names_the_fix(level):
    model, optimizer = loops.prepared(level, adam)
    params = list(model.parameters())
    optimizer.state.update(zip(params, states_like(params), strict=True))
    with pytest.raises(RuntimeError, match="Make state like the parameters"):
        loops.train_step(model, optimizer, *loops.batch(seed=3))


class SlowWeights(torch.optim.SGD):
    """Makes state where a group is added."""

    def add_param_group(self, group):
        super().add_param_group(group)
        for param in self.param_groups[-1]["params"]:
            self.state[param]["slow"] = param.detach().clone()


@pytest.mark.parametrize("is_new", [False, True])
def test_state_made_for_a_later_group_has_the_dtype_of_what_is_stepped(level, is_new):
    model = loops.net()
    optimizer = SlowWeights(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if is_new:
        model[2] = torch.nn.Linear(8, 2)
    optimizer.add_param_group({"params": model[2].parameters()})
    for param in optimizer.param_groups[1]["params"]:
        assert optimizer.state[param]["slow"].dtype is param.dtype
