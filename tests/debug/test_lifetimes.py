"""The tools keep nothing alive: no model, optimizer, session, hook or tensor outlives its use."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from apex import amp
from tests.debug.test_auto_trace import bad_step, pair
from tests.support.steps import live_sessions
from tests.support.training import batch, overflowing, prepared, train_step


def references(model, optimizer):
    """Weak references to a model, its optimizer, and every tensor of both."""
    tensors = [*model.parameters(), *model.buffers(), *amp.master_params(optimizer)]
    return [weakref.ref(each) for each in (model, optimizer, *tensors)]


def alive(references):
    gc.collect()
    return [each() for each in references if each() is not None]


def own_hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


# -- History -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_a_history_keeps_nothing_of_its_training_alive(level, stopped):
    model, optimizer = prepared(level, loss_scale="dynamic")
    history = amp.debug.History(optimizer)
    for x, y in (batch(), overflowing()):
        train_step(model, optimizer, x, y)
    if stopped:
        history.stop()
    gone = references(model, optimizer)
    del model, optimizer, x, y
    assert alive(gone) == []
    assert live_sessions() == 0
    assert [item.overflow for item in history.passes] == [False, True]
    history.stop()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_history_ends_with_its_last_reference(level):
    model, optimizer = prepared(level)
    history = amp.debug.History(optimizer)
    train_step(model, optimizer, *batch())
    gone = weakref.ref(history)
    del history
    assert gone() is None
    train_step(model, optimizer, *batch())


# -- traces ------------------------------------------------------------------------------------


def test_an_ended_trace_keeps_neither_model_nor_tensors_alive():
    model, optimizer = prepared("O1")
    hooks = own_hooks(model)
    with amp.debug.trace_overflow(model) as trace:
        train_step(model, optimizer, *overflowing())
    assert own_hooks(model) == hooks
    gone = references(model, optimizer)
    del model, optimizer
    assert alive(gone) == []
    assert live_sessions() == 0
    assert trace.first is not None


@pytest.mark.parametrize("tool", [amp.debug.trace_overflow, amp.debug.trace_rounding])
def test_a_trace_is_entered_once_and_leaves_nothing(tool):
    model = torch.nn.Linear(2, 2)
    modes = _get_current_dispatch_mode_stack()
    trace = tool(model)
    with trace, pytest.raises(RuntimeError, match="was entered before"):
        trace.__enter__()
    with pytest.raises(RuntimeError, match=f"Call {tool.__name__} again"):
        trace.__enter__()
    assert _get_current_dispatch_mode_stack() == modes
    assert not model._forward_hooks


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_handle_of_arm_keeps_nothing_alive_once_disarmed(level):
    model, optimizer = pair(level)
    hooks = own_hooks(model)
    handle = amp.debug.arm(optimizer, after_skips=1)
    bad_step(model, optimizer)
    bad_step(model, optimizer)
    handle.disarm()
    assert own_hooks(model) == hooks
    gone = references(model, optimizer)
    del model, optimizer
    assert alive(gone) == []
    assert live_sessions() == 0
    assert handle.trace.first is not None


def test_an_explanation_keeps_nothing_alive():
    model, optimizer = prepared("O4")
    found = amp.debug.explain(model, torch.randn(3, 4))
    gone = references(model, optimizer)
    del model, optimizer
    assert alive(gone) == []
    assert live_sessions() == 0
    assert found.ops
