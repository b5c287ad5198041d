"""Models that are a ``torch.fx.GraphModule``: each has a class of its own, and writes to it."""

import copy

import pytest
import torch
from torch import fx

from apex import amp
from tests.model.cases import LEVELS, prepare_unskipped
from tests.support import loops

every_level = pytest.mark.parametrize("level", LEVELS)


class TwoGraphs(fx.GraphModule):
    """As torchvision's feature extractors: another graph for training than for evaluation."""

    def __init__(self, root):
        self.graphs = {True: fx.Tracer().trace(root), False: fx.Tracer().trace(root)}
        super().__init__(root, self.graphs[True])

    def train(self, mode=True):
        self.graph = self.graphs[mode]
        return super().train(mode)


def x():
    return loops.batch()[0]


@every_level
def test_a_graph_trains_as_the_model_that_it_is_of_and_so_do_its_copies(level):
    model, optimizer = prepare_unskipped(level)
    loops.train(model, optimizer)
    expected = model(x())
    del model, optimizer
    model, optimizer = prepare_unskipped(level, fx.symbolic_trace(loops.net()))
    loops.train(model, optimizer)
    for each in (model, copy.copy(model), copy.deepcopy(model), loops.saved_and_loaded(model)):
        assert torch.equal(each(x()), expected)
        assert loops.same(list(each.parameters()), list(model.parameters()))


@every_level
def test_a_graph_compiled_anew_casts_as_before(level):
    model, optimizer = prepare_unskipped(level, TwoGraphs(loops.net()))
    loops.train(model, optimizer)
    before = model(x())
    model.eval()
    model.train()
    model.recompile()
    assert torch.equal(model(x()), before)
    loops.train(model, optimizer)
    plain, _ = amp.restore(model, optimizer)
    assert type(plain).__mro__[1] is TwoGraphs
