"""The tools keep nothing alive: no model, optimizer, session, hook or tensor outlives its use."""

import gc
import warnings
import weakref
from contextlib import suppress

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from apex import amp
from tests.support.loops import batch, every, live_sessions, overflowing, prepared, train_step


def recorded(model, optimizer):
    history = amp.debug.History(optimizer)
    train_step(model, optimizer, *overflowing())
    return history


def traced(model, optimizer):
    with amp.debug.trace_overflow(model) as trace:
        train_step(model, optimizer, *overflowing())
    return trace


def rounded(model, optimizer):
    with amp.debug.trace_rounding(model) as trace:
        train_step(model, optimizer, *batch())
    return trace


def disarmed(model, optimizer):
    handle = amp.debug.arm(optimizer, after_skips=1)
    for _ in range(2):
        train_step(model, optimizer, *overflowing())
    handle.disarm()
    return handle


def explained(model, optimizer):
    return amp.debug.explain(model, torch.randn(3, 4))


@every(level=["O1", "O2"], tool=[recorded, traced, rounded, disarmed, explained])
def test_what_a_tool_returns_keeps_nothing_alive(tool, level):
    model, optimizer = prepared(level)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    found = tool(model, optimizer)
    after = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert after == hooks
    tensors = [*model.parameters(), *model.buffers(), *amp.master_params(optimizer)]
    gone = [weakref.ref(each) for each in (model, optimizer, *tensors)]
    del model, optimizer, tensors
    gc.collect()
    assert [each() for each in gone if each() is not None] == []
    assert live_sessions() == 0
    assert found is not None


def test_a_history_ends_with_its_last_reference():
    model, optimizer = prepared("O2")
    gone = weakref.ref(recorded(model, optimizer))
    assert gone() is None
    train_step(model, optimizer, *batch())


traces = pytest.mark.parametrize("tool", [amp.debug.trace_overflow, amp.debug.trace_rounding])


@traces
def test_a_trace_is_entered_once(tool):
    trace = tool(torch.nn.Linear(2, 2))
    with trace, pytest.raises(RuntimeError, match="was entered before"):
        trace.__enter__()
    with pytest.raises(RuntimeError, match=f"Call {tool.__name__} again"):
        trace.__enter__()


@traces
def test_traces_that_end_in_another_order_trace_to_their_ends(tool):
    model, x = torch.nn.Linear(2, 2).bfloat16(), torch.ones(1, 2).bfloat16()
    first, second = tool(model).__enter__(), tool(model).__enter__()
    first.__exit__()
    (model(x) - 1e30 * model(x)).square().sum().backward()
    second.__exit__()
    assert "no operator ran" in str(first)
    assert "no operator ran" not in str(second)
    assert _get_current_dispatch_mode_stack() == []
    calls = []
    torch.compile(model, backend=lambda graph, _: calls.append(1) or graph)(x)
    assert calls  # compiled code is compiled again


def facts(model):
    hooks = [*model._forward_hooks, *model._forward_pre_hooks]
    hooks += [*modules._global_forward_hooks, *optimizers._global_optimizer_pre_hooks]
    return hooks, _get_current_dispatch_mode_stack(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("fails", [True, False])
@traces
def test_a_trace_leaves_no_hook_no_mode_no_draw_and_the_script_s_warning_filters(tool, fails):
    model = torch.nn.Linear(2, 2).bfloat16()
    before = facts(model)
    with warnings.catch_warnings():
        filters = list(warnings.filters)
        with suppress(RuntimeError), tool(model):
            warnings.simplefilter("ignore", FutureWarning)
            model(torch.ones(1, 3 if fails else 2, dtype=torch.bfloat16)).exp()
        assert list(warnings.filters) == [("ignore", None, FutureWarning, None, 0), *filters]
    assert facts(model) == before
