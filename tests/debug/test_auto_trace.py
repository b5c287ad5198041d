"""``amp.debug.arm``: after consecutive skips the next step is traced, and no other."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from apex import amp
from apex.debug.watch import arm
from tests.support import loops
from tests.support.host_reads import Operators


def bad_step(model, optimizer, **options):
    """A whole iteration with an overflow in fp16 (the input times the weights of ``first``)."""
    x = torch.full((3, 4), 6e4)
    loops.descend(model(x).float().square().mean(), optimizer, **options)


def tracing():
    return _get_current_dispatch_mode() is not None


def pair(level="O1", **options):
    model, optimizer = loops.prepared(level, model=loops.Net(), **options)
    nn.init.constant_(model.first.weight, 100.0)
    return model, optimizer


@loops.every(level=["O1", "O2"], after_skips=[1, 3])
def test_after_consecutive_skips_the_next_step_is_traced_and_reported_once(log, level, after_skips):
    model, optimizer = pair(level)
    handle = arm(optimizer, after_skips)
    for _ in range(after_skips):
        assert not tracing()
        bad_step(model, optimizer)
    assert tracing()
    assert log() == []
    for _ in range(after_skips + 2):
        bad_step(model, optimizer)
        assert not tracing()
    assert handle.trace.first.module == "first"
    (message,) = log()
    first = f"{after_skips} or more consecutive steps were skipped. First overflow:"
    assert message.startswith(first)
    assert "in first, forward" in message


def test_a_handle_that_disarms_itself_hides_no_pass_from_a_history(log):
    model, optimizer = pair()
    handle = arm(optimizer, after_skips=1)
    history = amp.debug.History(optimizer)
    for _ in range(3):
        bad_step(model, optimizer)
    assert (handle.trace.first.module, len(log()), len(history.passes)) == ("first", 1, 3)


def test_a_clean_traced_step_logs_nothing_and_stays_armed(log):
    model, optimizer = pair()
    handle = arm(optimizer, after_skips=1)
    loops.overflow(model, optimizer)
    assert tracing()
    nn.init.constant_(model.first.weight, 0.1)
    loops.descend(loops.small_loss(model) * 2.0**-16, optimizer)
    assert not tracing()
    assert handle.trace.first is None
    assert log() == []
    loops.overflow(model, optimizer)
    assert tracing()
    handle.disarm()
    assert not tracing()


def test_an_exception_in_the_backward_pass_ends_the_trace():
    model, optimizer = pair()
    arm(optimizer, after_skips=1)
    bad_step(model, optimizer)
    optimizer.zero_grad()
    assert tracing()
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loops.small_loss(model), optimizer):
        raise ZeroDivisionError
    assert not tracing()


def test_a_user_s_dispatch_mode_around_each_step_stays_active(log):
    model, optimizer = pair()
    arm(optimizer, after_skips=2)
    for _ in range(4):
        mine = Operators()
        with mine:
            bad_step(model, optimizer)
            assert _get_current_dispatch_mode() is mine
    assert not tracing()
    assert len(log()) == 1


def test_a_pass_of_another_loss_does_not_end_the_trace(log):
    model, optimizer = pair(num_losses=2)
    arm(optimizer, after_skips=1)
    bad_step(model, optimizer, loss_id=0)
    loops.descend(model.first.weight.sum() * 1e-6, optimizer, loss_id=1)
    assert tracing()
    bad_step(model, optimizer, loss_id=0)
    assert not tracing()
    assert len(log()) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_skips_of_a_scale_that_settles_are_silent_and_leave_the_handle_armed(log, level):
    """The gradients fit fp16 below a scale of 2**10."""
    model, optimizer = loops.one_weight(level)
    handle = arm(optimizer, after_skips=3)
    traced = []
    for step in range(12):
        if tracing():
            traced.append(step)
        loops.descend((model(torch.ones(1, 1)) * 2.0**6).sum(), optimizer)
    assert traced == [3, 6]
    assert handle.trace.first.cause == "loss scale"
    assert log() == []
    assert not tracing()


def test_bad_arguments_are_refused():
    _, optimizer = loops.prepared("O1")
    with pytest.raises(ValueError, match=r"after_skips is 0; it must be an integer"):
        arm(optimizer, 0)
    for level, options in (("O5", {}), ("O2", {"loss_scale": 8.0})):
        _, static = loops.prepared(level, model=loops.Net(), **options)
        with pytest.raises(ValueError, match=rf"static loss scale .*\({level}\).*apex trace train"):
            arm(static)
