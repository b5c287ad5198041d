"""CUDA graphs of whole iterations, of passes alone and of models train as eager steps do."""

import pytest
import torch

from apex import amp
from benchmarks.graphs import CAPTURED, difference_of_replays
from tests.support import training as t

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", t.MIXED)
@pytest.mark.parametrize("captured", CAPTURED)
def test_replays_train_as_eager_iterations_do(captured, level):
    for max_norm in (None, 0.05):
        assert difference_of_replays(level, captured, max_norm=max_norm) <= 2e-8


def captured_pass(level, make_optimizer):
    model, optimizer = t.prepared(level, make_optimizer, t.net().cuda(), loss_scale="dynamic")
    x, y = (tensor.cuda() for tensor in t.batch())
    t.train_step(model, optimizer, x, y)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        t.backward(model, optimizer, x, y)
    return optimizer, graph, x


@pytest.mark.parametrize("level", t.MIXED)
def test_an_optimizer_in_python_steps_after_replays_and_skips_overflows(level):
    optimizer, graph, x = captured_pass(level, lambda p: torch.optim.RMSprop(p, foreach=True))
    before = t.masters(optimizer)
    graph.replay()
    optimizer.step()
    after = t.masters(optimizer)
    assert not t.same(before, after)
    x.fill_(torch.inf)
    graph.replay()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert t.same(after, t.masters(optimizer))


def test_a_step_that_asks_the_host_is_refused_under_capture():
    model, optimizer = t.prepared("O2", t.sgd, t.net().cuda())
    x, y = (tensor.cuda() for tensor in t.batch())
    t.train_step(model, optimizer, x, y)
    t.backward(model, optimizer, x, y)
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="step of SGD, which asks on the host"), graph:
        optimizer.step()


@pytest.mark.parametrize("level", t.WITH_MASTERS)
def test_gradients_cleared_between_replays_are_an_error(level):
    optimizer, graph, _ = captured_pass(level, t.fused_adamw_of)
    optimizer.zero_grad()
    graph.replay()
    with pytest.raises(RuntimeError, match="cleared after the capture"):
        optimizer.step()


@pytest.mark.emulated
def test_the_emulation_refuses_host_reads_under_capture():
    flag = torch.zeros((), device="cuda")
    for read in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu):
        graph = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), graph:
            read(flag)
