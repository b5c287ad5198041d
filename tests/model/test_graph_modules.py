"""Models that are a ``torch.fx.GraphModule``: each has a class of its own, and writes to it."""

import copy

import pytest
import torch
from torch import fx

from apex import amp
from tests.model.cases import LEVELS, prepared, train
from tests.support import training as cases
from tests.support.training import same, saved_and_loaded

every_level = pytest.mark.parametrize("level", LEVELS)


def make_graph():
    return fx.symbolic_trace(cases.net())


class TwoGraphs(fx.GraphModule):
    """As torchvision's feature extractors: another graph for training than for evaluation."""

    def __init__(self, root):
        self.graphs = {True: fx.Tracer().trace(root), False: fx.Tracer().trace(root)}
        super().__init__(root, self.graphs[True])

    def train(self, mode=True):
        self.graph = self.graphs[mode]
        return super().train(mode)


def x():
    return cases.batch()[0]


@every_level
def test_a_graph_trains_as_the_model_that_it_is_of(level):
    losses = []
    for plain in (cases.net(), make_graph()):
        model, optimizer = prepared(level, plain)
        train(model, optimizer)
        losses.append(cases.loss_of(model, *cases.batch()).item())
        del plain, model, optimizer
    assert losses[0] == losses[1]


@every_level
def test_a_graph_compiled_anew_casts_as_before(level):
    model, optimizer = prepared(level, TwoGraphs(cases.net()))
    train(model, optimizer)
    before = model(x())
    model.eval()
    model.train()
    model.recompile()
    assert torch.equal(model(x()), before)
    train(model, optimizer)
    plain, _ = amp.restore(model, optimizer)
    assert type(plain).__mro__[1] is TwoGraphs


@every_level
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, saved_and_loaded])
def test_a_copy_computes_as_the_model(level, copied):
    model, optimizer = prepared(level, make_graph())
    train(model, optimizer)
    own = copied(model)
    assert torch.equal(own(x()), model(x()))
    assert same(list(own.parameters()), list(model.parameters()))
