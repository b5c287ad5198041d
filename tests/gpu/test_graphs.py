"""CUDA graphs of whole iterations, of passes alone and of models train as eager steps do."""

import functools
import re
from pathlib import Path

import pytest
import torch

from apex import amp
from apex.optimizers import FusedAdam
from benchmarks.graphs import CAPTURED, difference_of_replays
from tests.support import loops

level = loops.at_levels(*loops.MIXED)

# The warm-up of make_graphed_callables keeps its graph, and so the nodes of another stream.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The AccumulateGrad node's")]


@pytest.mark.parametrize("captured", CAPTURED)
def test_replays_train_as_eager_iterations_do(captured, level):
    for max_norm in (None, 0.05):
        assert difference_of_replays(level, captured, max_norm=max_norm) <= 2e-8


def warmed_up(level, make_optimizer, **options):
    """A model, its optimizer and a batch, after one step."""
    pair = loops.prepared(level, make_optimizer, loops.net().cuda(), **options)
    data = [tensor.cuda() for tensor in loops.batch()]
    loops.train_step(*pair, *data)
    return *pair, *data


def captured_pass(level, make_optimizer):
    model, optimizer, x, y = warmed_up(level, make_optimizer, loss_scale="dynamic")
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loops.backward(model, optimizer, x, y)
    return optimizer, graph, x


def test_an_optimizer_in_python_steps_after_replays_and_skips_overflows(level):
    optimizer, graph, x = captured_pass(level, lambda p: torch.optim.RMSprop(p, foreach=True))
    before = loops.masters(optimizer)
    graph.replay()
    optimizer.step()
    after = loops.masters(optimizer)
    assert not loops.same(before, after)
    x.fill_(torch.inf)
    graph.replay()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert loops.same(after, loops.masters(optimizer))


ASKING = [
    ("O2", loops.sgd, "step of SGD, which asks on the host"),
    ("O5", FusedAdam, "a step whose count is on the host"),
]


@pytest.mark.parametrize(("level", "make_optimizer", "message"), ASKING)
def test_a_step_that_asks_the_host_is_refused_under_capture(level, make_optimizer, message):
    model, optimizer, x, y = warmed_up(level, make_optimizer)
    loops.backward(model, optimizer, x, y)
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match=message), graph:
        optimizer.step()


def step_and_zero(model, optimizer, x, y):
    """Leaves gradients of zero, to which the next iteration adds."""
    loops.backward(model, optimizer, x, y)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("iterate", [loops.train_step, step_and_zero])
def test_fused_adam_steps_in_a_graph_as_eagerly(level, iterate):
    weights = []
    for captured in (True, False):
        make_optimizer = functools.partial(FusedAdam, lr=1e-2, capturable=True)
        model, optimizer, x, y = warmed_up(level, make_optimizer)
        step = functools.partial(iterate, model, optimizer, x, y)
        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(3):
            step()
        weights.append(loops.masters(optimizer))
    assert loops.same(*weights)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_gradients_cleared_between_replays_are_an_error(level):
    optimizer, graph, _ = captured_pass(level, loops.fused_adamw_of)
    optimizer.zero_grad()
    graph.replay()
    with pytest.raises(RuntimeError, match="cleared after the capture"):
        optimizer.step()


def test_the_page_about_graphs_runs_as_written():
    text = (Path(__file__).parents[2] / "docs" / "howto" / "cuda_graphs.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 5
    assert names["optimizer"].state


def test_a_captured_block_whose_gradients_stay_scaled_is_an_error():
    model, optimizer, x, y = warmed_up("O2", loops.fused_adamw_of)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loops.backward(model, optimizer, x, y, delay_unscale=True)
    with pytest.raises(RuntimeError, match="not the last block of the step"):
        optimizer.step()
