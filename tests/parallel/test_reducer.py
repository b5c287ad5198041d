"""Reducer averages gradients at the script's call."""

import pytest
import torch
from torch import nn

from apex.parallel import Reducer

two_ranks = pytest.mark.distributed


def net(rank):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
        model.bias.fill_(rank + 1.0)
    return model


def build(rank):
    model = net(rank)
    Reducer(model)
    return [param.detach() for param in model.parameters()]


@two_ranks
def test_parameters_become_those_of_rank_0(on_two_ranks):
    for params in on_two_ranks(build):
        assert all(torch.equal(param, torch.ones_like(param)) for param in params)


def reduce_module(rank):
    model = net(rank)
    reducer = Reducer(model)
    model.weight.grad = torch.full((2, 2), rank + 1.0)
    if rank == 1:
        model.bias.grad = torch.full((2,), 4.0)
    reducer.reduce()
    return model.weight.grad, model.bias.grad


@two_ranks
def test_reduce_averages_the_modules_gradients(on_two_ranks):
    for weight, _ in on_two_ranks(reduce_module):
        assert torch.equal(weight, torch.full((2, 2), 1.5))


@two_ranks
def test_a_gradient_of_one_rank_counts_as_zero_in_the_other(on_two_ranks):
    for _, bias in on_two_ranks(reduce_module):
        assert torch.equal(bias, torch.full((2,), 2.0))


def reduce_grads(rank):
    grads = {"a": [torch.full((3,), rank + 1.0)], "b": torch.full((2,), rank, dtype=torch.float16)}
    Reducer(grads.values()).reduce()
    return grads["a"][0], grads["b"]


@two_ranks
def test_reduce_averages_given_gradients_of_any_nesting_and_dtype(on_two_ranks):
    for first, second in on_two_ranks(reduce_grads):
        assert torch.equal(first, torch.full((3,), 1.5))
        assert torch.equal(second, torch.full((2,), 0.5, dtype=torch.float16))


def different_modules(rank):
    with pytest.raises(RuntimeError, match=r"differ in number, shape or dtype .* ranks \[1\]"):
        Reducer(nn.Linear(2, 2 + rank))


@two_ranks
def test_ranks_with_different_modules_are_refused_everywhere(on_two_ranks):
    on_two_ranks(different_modules)


def test_without_a_process_group_it_is_refused():
    with pytest.raises(RuntimeError, match="Reducer needs a process group"):
        Reducer(nn.Linear(2, 2))


@pytest.mark.parametrize("given", [[], None, 3, "text"])
def test_nothing_to_reduce_is_refused(alone, given):
    with pytest.raises(TypeError, match="it takes a module or an iterable of gradients"):
        Reducer(given)
