"""Models that are a ``torch.fx.GraphModule``: each has a class of its own, and writes to it."""

import copy

import torch
from torch import fx

from apex import amp
from tests.model.cases import EPS, prepare
from tests.support import loops


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


def test_a_graph_trains_as_the_model_that_it_is_of_and_so_do_its_copies(level):
    model, optimizer = prepare(level)
    loops.train(model, optimizer)
    expected = model(x())
    del model, optimizer
    model, optimizer = prepare(level, fx.symbolic_trace(loops.net()))
    loops.train(model, optimizer)
    assert torch.equal(model(x()), expected)
    for each in (copy.copy(model), copy.deepcopy(model), loops.saved_and_loaded(model)):
        assert loops.same(dict(each.state_dict()), dict(model.state_dict()))
        torch.testing.assert_close(each(x()), expected, rtol=0.0, atol=8 * EPS[level] + 1e-6)


def test_a_graph_compiled_anew_casts_as_before(level):
    model, optimizer = prepare(level, TwoGraphs(loops.net()))
    loops.train(model, optimizer)
    before = model(x())
    model.eval()
    model.train()
    model.recompile()
    assert torch.equal(model(x()), before)
    loops.train(model, optimizer)
    plain, _ = amp.restore(model, optimizer)
    assert type(plain).__mro__[1] is TwoGraphs
