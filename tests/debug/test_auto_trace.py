"""``amp.debug.arm``: after consecutive skips the next step is traced, and no other."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from apex import amp
from apex.debug.watch import arm
from tests.support.host_reads import HostReads
from tests.support.steps import Net, backward, loss_of, one_weight, overflow, prepared, sgd
from tests.training import cases


def bad_step(model, optimizer, **options):
    """A whole iteration with an overflow in fp16 (the input times the weights of ``first``)."""
    optimizer.zero_grad()
    x = torch.full((3, 4), 6e4)
    backward(model(x).float().square().mean(), optimizer, **options)
    optimizer.step()


def good_step(model, optimizer, **options):
    optimizer.zero_grad()
    backward(loss_of(model) * 2.0**-16, optimizer, **options)
    optimizer.step()


def tracing():
    return _get_current_dispatch_mode() is not None


def pair(level="O1", **options):
    model, optimizer = prepared(level, **options)
    nn.init.constant_(model.first.weight, 100.0)
    return model, optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("after_skips", [1, 3])
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
    assert message.startswith(
        f"{after_skips} or more consecutive steps were skipped. First overflow:"
    )
    assert "in first, forward" in message


def test_a_clean_traced_step_logs_nothing_and_stays_armed(log):
    model, optimizer = pair()
    handle = arm(optimizer, after_skips=1)
    overflow(model, optimizer)
    assert tracing()
    nn.init.constant_(model.first.weight, 0.1)
    good_step(model, optimizer)
    assert not tracing()
    assert handle.trace.first is None
    assert log() == []
    overflow(model, optimizer)
    assert tracing()
    handle.disarm()
    assert not tracing()


@pytest.mark.parametrize("begun", [False, True])
def test_disarm_stops_a_trace_at_any_time(log, begun):
    model, optimizer = pair()
    handle = arm(optimizer, after_skips=2)
    for _ in range(2 if begun else 1):
        bad_step(model, optimizer)
    assert tracing() == begun
    handle.disarm()
    handle.disarm()
    for _ in range(3):
        bad_step(model, optimizer)
        assert not tracing()
    assert log() == []


def own_hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_an_exception_in_the_model_ends_the_trace():
    model, optimizer = pair()
    before = own_hooks(model)
    handle = arm(optimizer, after_skips=1)
    bad_step(model, optimizer)
    assert tracing()
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3, 5))
    assert not tracing()
    handle.disarm()
    assert own_hooks(model) == before


def test_an_exception_in_the_backward_pass_ends_the_trace():
    model, optimizer = pair()
    arm(optimizer, after_skips=1)
    bad_step(model, optimizer)
    assert tracing()
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer):
        raise ZeroDivisionError
    assert not tracing()


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_validation_ends_the_trace(how):
    model, optimizer = pair()
    arm(optimizer, after_skips=1)
    bad_step(model, optimizer)
    assert tracing()
    model.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"):
        model(torch.ones(3, 4))
    assert not tracing()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_user_s_dispatch_mode_around_each_step_stays_active(log):
    model, optimizer = pair()
    arm(optimizer, after_skips=2)
    for _ in range(4):
        mine = Mode()
        with mine:
            bad_step(model, optimizer)
            assert _get_current_dispatch_mode() is mine
    assert not tracing()
    assert len(log()) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_logs_the_report_and_others_a_line(log, rank):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        model, optimizer = pair()
        handle = arm(optimizer, after_skips=1)
        bad_step(model, optimizer)
        bad_step(model, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    (message,) = log()
    assert handle.trace.first.what in message
    assert ("remedy" in message) == (rank == 0)
    assert message.startswith("Rank 1: ") == (rank == 1)


# -- a dynamic scale that is finding its value -----------------------------------------------


def scaled_slope(level, exponent, steps, **options):
    """Steps whose gradients fit fp16 below a scale of 2**(16 - exponent)."""
    model, optimizer = one_weight(level, **options)
    handle = arm(optimizer, after_skips=2)
    for _ in range(steps):
        optimizer.zero_grad()
        backward((model(torch.ones(1, 1)) * 2.0**exponent).sum(), optimizer)
        optimizer.step()
    return handle


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_skips_of_a_scale_that_settles_are_silent_and_leave_the_handle_armed(log, level):
    handle = scaled_slope(level, exponent=6, steps=12)
    assert handle.trace.first.cause == "loss scale"
    assert log() == []
    assert not tracing()


# -- static scales ---------------------------------------------------------------------------

STATIC = pytest.mark.parametrize(
    ("level", "options"),
    [("O0", {}), ("O4", {}), ("O5", {}), ("O1", {"loss_scale": 8.0}), ("O2", {"loss_scale": 8.0})],
)


def good_batch(model):
    return model(0.1 * torch.ones(3, 4)).float().square().mean()


def bad_batch(model):
    return model(torch.full((3, 4), float("inf"))).float().square().mean()


def iteration(model, optimizer, loss_of_batch, *, steps=True):
    optimizer.zero_grad()
    backward(loss_of_batch(model), optimizer)
    if steps:
        optimizer.step()


@STATIC
def test_with_a_static_scale_the_first_nonfinite_gradients_are_named(log, level, options):
    model, optimizer = prepared(level, **options)
    handle = arm(optimizer)
    for loss_of_batch in (good_batch, good_batch, bad_batch, good_batch, good_batch):
        iteration(model, optimizer, loss_of_batch)
    (message,) = log()
    assert "not finite since backward pass 3" in message
    assert "first.weight, first.bias, norm.weight and 3 more (6 of 6 gradients)" in message
    assert "earlier checkpoint" in message
    assert "loss_scale='dynamic'" in message
    assert not tracing()
    assert handle.trace.first is not None


@STATIC
def test_with_a_static_scale_the_operator_is_named_if_the_script_skips_by_itself(
    log, level, options
):
    model, optimizer = prepared(level, **options)
    arm(optimizer)

    def overflows(model):
        return (model(0.1 * torch.ones(3, 4)).float() * 1e38 * 1e38).mean()

    for loss_of_batch in (good_batch, overflows, overflows, good_batch):
        iteration(model, optimizer, loss_of_batch, steps=loss_of_batch is good_batch)
    (message,) = log()
    assert "not finite since backward pass 2" in message
    assert "First overflow: aten.mul" in message


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_watching_static_scales_reads_nothing_from_a_device(level):
    model, optimizer = cases.prepared(level, lambda p: torch.optim.Adam(p, fused=True))
    handle = arm(optimizer)
    sent = []
    handle._readback.send = lambda _, values: sent.append(values)
    with HostReads() as reads:
        for x, y in cases.batches(3):
            cases.train_step(model, optimizer, x, y)
    assert reads.count == 0
    assert [values.shape for values in sent] == [(4,)] * 3


def test_bad_arguments_are_refused():
    _, optimizer = prepared("O1")
    for after_skips in (0, "3", optimizer):
        with pytest.raises(ValueError, match=r"after_skips is .*; it must be an integer"):
            arm(optimizer, after_skips)
    with pytest.raises(RuntimeError, match="not prepared"):
        arm(sgd(Net()))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_untraced_step_runs_the_same_operators_and_host_reads(level):
    def cost(armed):
        model, optimizer = cases.prepared(level, lambda p: torch.optim.Adam(p, fused=True))
        if armed:
            arm(optimizer, after_skips=3)
        data = list(cases.batches(5, overflow_at={3}))
        for x, y in data[:2]:
            cases.train_step(model, optimizer, x, y)
        with Operators() as operators, HostReads() as reads:
            for x, y in data[2:]:
                cases.train_step(model, optimizer, x, y)
        return operators.names, reads.count

    assert cost(armed=True) == cost(armed=False)


def test_a_model_can_be_copied_and_saved_in_the_traced_iteration():
    model, optimizer = pair()
    handle = arm(optimizer, 1)
    bad_step(model, optimizer)
    assert tracing()
    made = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    made(torch.ones(3, 4))
    assert tracing()  # a call of the copy is none of the model, which would end the trace
    bad_step(model, optimizer)
    assert handle.trace.first.module == "first"
