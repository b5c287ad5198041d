"""What ``torch.compile`` leaves alone, by the private switch of torch 2.8 and by that before it."""

from types import SimpleNamespace

import pytest
import torch

from apex._torch import dynamo
from tests.compiled.cases import compiled, graph_breaks
from tests.support.features import TORCH_VERSION


def skip_code(code):
    """Does what ``eval_frame.skip_code`` does, which torch 2.8 and newer express by a strategy."""
    frame = torch._C._dynamo.eval_frame
    strategy = frame._FrameExecStrategy(frame._FrameAction.SKIP, frame._FrameAction.DEFAULT)
    frame.set_code_exec_strategy(code, strategy)


@pytest.fixture(params=["torch 2.8", "before"])
def marks(request, monkeypatch):
    frame = torch._C._dynamo.eval_frame
    if request.param == "before" and TORCH_VERSION >= (2, 8):
        before = SimpleNamespace(skip_code=skip_code, set_eval_frame=frame.set_eval_frame)
        monkeypatch.setattr(dynamo, "_eval_frame", before)
    return dynamo


def inner(x):
    return x.sin(), torch.compiler.is_compiling()


def outer():
    """A new function with code of its own: the marks are on the code."""
    return eval("lambda x: inner(x)", {"inner": inner})


def around(marked):
    def call(x):
        result, compiling = marked(x + 1)
        return result * 2, compiling

    return call


def test_untraced_function_runs_in_eager_with_what_it_calls(marks):
    run, graphs = compiled(around(marks.untraced(outer())), fullgraph=False)
    result, compiling = run(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 2.0).sin() * 2)
    assert (compiling, graphs.frame_count, graph_breaks()) == (False, 2, 1)


def test_untraced_frame_lets_what_it_calls_be_compiled(marks):
    run, graphs = compiled(around(marks.untraced_frame(outer())), fullgraph=False)
    _, compiling = run(torch.ones(2))
    assert (compiling, graphs.frame_count, graph_breaks()) == (True, 3, 1)


def test_at_tracing_is_called_while_tracing_and_not_by_the_code():
    calls = []

    @dynamo.at_tracing
    def note():
        calls.append(dynamo.is_compiling_here())

    def fn(x):
        note()
        return x + 1

    run, graphs = compiled(fn)
    for _ in range(3):
        run(torch.ones(2))
    assert (calls, graphs.frame_count) == ([True], 1)


def test_nothing_compiles_here_outside_of_compiled_code():
    run, _ = compiled(lambda x: x + 1)
    run(torch.ones(2))
    assert not dynamo.is_compiling_here()
