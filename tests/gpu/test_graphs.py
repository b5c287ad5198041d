"""CUDA graphs of whole iterations, of passes alone and of models train as eager steps do."""

import functools
import re
from pathlib import Path

import pytest
import torch

from apex import amp
from apex._core import tree
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
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


def captured_pass(level, make_optimizer, loss_scale="dynamic"):
    model, optimizer, x, y = warmed_up(level, make_optimizer, loss_scale=loss_scale)
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


def test_gradients_zeroed_between_replays_are_those_of_the_next_one(level):
    found = []
    for zeroes in (False, True):
        optimizer, graph, _ = captured_pass(level, loops.fused_adamw_of)
        for _ in range(3):
            if zeroes:
                optimizer.zero_grad(set_to_none=False)
            graph.replay()
            optimizer.step()
        found.append(loops.masters(optimizer))
    assert loops.same(*found)


@loops.every(level=loops.MIXED, scale=["dynamic", 1.0])
def test_masters_that_are_read_after_a_step_follow_the_next_replay(level, scale):
    found = []
    for reads in (False, True):
        optimizer, graph, x = captured_pass(level, loops.fused_adamw_of, scale)
        for _ in range(3):
            x.mul_(1.5)
            graph.replay()
            optimizer.step()
            if reads:
                loops.grads(amp.master_params(optimizer))
        found.append(loops.masters(optimizer))
    assert loops.same(*found)


def zeroed_in_place(model, optimizer, x, y):
    loops.backward(model, optimizer, x, y)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def test_an_eager_iteration_between_a_capture_and_its_first_replay_trains_as_alone(level):
    found = []
    for captures in (True, False):
        make_optimizer = functools.partial(FusedAdam, lr=1e-2, capturable=True)
        trained = warmed_up(level, make_optimizer, loss_scale="dynamic")
        for _ in range(2):
            zeroed_in_place(*trained)
        if captures:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                zeroed_in_place(*trained)
        zeroed_in_place(*trained)
        found.append(loops.masters(trained[1]))
    assert loops.same(*found)


def test_an_overflow_before_a_capture_skips_no_eager_step_after_it(level):
    model, optimizer, x, y = warmed_up(level, loops.fused_adamw_of, loss_scale="dynamic")
    optimizer.zero_grad()
    loops.backward(model, optimizer, x * torch.inf, y)
    optimizer.step()
    optimizer.zero_grad()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loops.backward(model, optimizer, x, y)
    optimizer.zero_grad()
    loops.backward(model, optimizer, x, y)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def captured_iteration(level):
    make_optimizer = functools.partial(FusedAdam, lr=1e-2, capturable=True)
    model, optimizer, x, y = warmed_up(level, make_optimizer, loss_scale="dynamic")
    step = functools.partial(loops.train_step, model, optimizer, x, y)
    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return model, optimizer, graph, x


def test_each_replay_tells_whether_it_was_skipped(level):
    _, optimizer, graph, x = captured_iteration(level)
    values = x.clone()
    for overflows in (False, True, False, True):
        x.copy_(values).mul_(torch.inf if overflows else 1.0)
        graph.replay()
        assert bool(amp.step_was_skipped(optimizer)) is overflows
        assert amp.step_was_skipped(optimizer, on_host=True) is overflows


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_forward_after_replays_casts_the_weights_that_they_have_written(level):
    model, _, graph, x = captured_iteration(level)
    output = None
    for _ in range(2):
        graph.replay()
        output = model(x)  # kept until the next one has run, with its graph
        with torch.no_grad():
            expected = model(x)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("make_optimizer", [FusedLAMB, FusedNovoGrad])
def test_a_count_that_was_loaded_is_not_captured_on_the_host(make_optimizer):
    optimizer_of = functools.partial(make_optimizer, lr=1e-2)
    model, optimizer, x, y = warmed_up("O2", optimizer_of, loss_scale="dynamic")
    optimizer.load_state_dict(optimizer.state_dict())
    loops.backward(model, optimizer, x, y)
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="one step before the capture"), graph:
        optimizer.step()


def test_a_learning_rate_that_was_loaded_to_the_cpu_moves_to_the_device(level):
    optimizer_of = functools.partial(FusedAdam, lr=1e-2, capturable=True)
    _, optimizer, _, _ = warmed_up(level, optimizer_of)
    saved = tree.map_tensors(torch.Tensor.cpu, optimizer.state_dict())
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert {group[name].device.type for name in ("lr", "step")} == {"cuda"}


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
