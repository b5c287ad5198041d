"""A history of scales, skips and gradient norms, recorded without a sync."""

import json
import math
import sys

import pytest
import torch

from apex import amp
from benchmarks.counting import counted_syncs
from tests.support import loops
from tests.support.host_reads import Operators


def norm_of(optimizer):
    grads = [param.grad for param in amp.master_params(optimizer)]
    return float(torch.nn.utils.get_total_norm(grads))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_pass_is_recorded_with_its_scale_and_the_norm_of_unscaled_gradients(level):
    model, optimizer = loops.prepared(level, max_loss_scale=2.0**8)
    norms = []
    with amp.debug.History(optimizer) as history:
        for x, y in (loops.batch(), loops.overflowing(), loops.batch()):
            optimizer.zero_grad()
            loops.backward(model, optimizer, x, y)
            norms.append(norm_of(optimizer))
            optimizer.step()
    passes = history.passes
    assert [item.index for item in passes] == [0, 1, 2]
    assert [item.overflow for item in passes] == [False, True, False]
    assert [item.loss_scale for item in passes] == [2.0**8, 2.0**7, 2.0**7]
    assert [passes[0].grad_norm, passes[2].grad_norm] == pytest.approx(norms[::2], rel=1e-6)
    assert not math.isfinite(passes[1].grad_norm)
    assert history.skipped == 1


def test_a_pass_that_an_exception_ends_is_not_recorded():
    model, optimizer = loops.prepared("O1")
    history = amp.debug.History(optimizer)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loops.small_loss(model), optimizer):
        raise ZeroDivisionError
    loops.backward(model, optimizer, *loops.batch())
    assert [item.index for item in history.passes] == [0]


def test_the_norm_adds_up_the_duplicate_rows_of_a_sparse_gradient():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    model, optimizer = loops.prepared("O4", model=embedding)
    with amp.debug.History(optimizer) as history:
        loops.scaled_backward(model(torch.tensor([1, 1, 2])).sum(), optimizer)
    assert history.passes[0].grad_norm == pytest.approx(10**0.5)  # of rows of 2 and of 1


def test_gradients_stay_in_16_bits():
    model, optimizer = loops.prepared("O5")
    with amp.debug.History(optimizer) as history:
        loops.backward(model, optimizer, *loops.batch())
    assert model[0].weight.grad.dtype is torch.bfloat16
    assert history.passes[0].grad_norm == pytest.approx(norm_of(optimizer), rel=1e-6)


def test_the_plot_shows_scales_and_marks_overflows(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    model, optimizer = loops.prepared("O2")
    history = amp.debug.History(optimizer)
    loops.train(model, optimizer, data=loops.batches(3, overflow_at={1}))
    figure = history.plot()
    scales, norms = figure.axes
    assert list(scales.lines[0].get_ydata()) == [2.0**16, 2.0**15, 2.0**15]
    assert (list(scales.lines[1].get_xdata()), list(scales.lines[1].get_ydata())) == ([1], [2**15])
    assert len(norms.lines[0].get_ydata()) == 3
    figure.savefig(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        history.plot()


@loops.every(level=["O1", "O2"], tool=[amp.debug.History, amp.debug.arm])
def test_no_trace_sees_the_operators_of_a_tool(tool, level):
    model, optimizer = loops.prepared(level)

    def seen():
        loops.train_step(model, optimizer, *loops.batch())
        with Operators() as found:
            loops.train_step(model, optimizer, *loops.overflowing())
            loops.train_step(model, optimizer, *loops.batch())
        return found.names

    alone = seen()
    _handle = tool(optimizer)
    assert seen() == alone


def test_a_limit_keeps_the_last_passes():
    model, optimizer = loops.prepared("O4")
    history = amp.debug.History(optimizer, limit=2)
    for _ in range(5):
        loops.backward(model, optimizer, *loops.batch())
    assert [item.index for item in history.passes] == [3, 4]


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_recording_never_syncs(level):
    model, optimizer = loops.prepared(level, loops.fused_adamw_of)
    history = amp.debug.History(optimizer)
    loops.train_step(model, optimizer, *loops.batch())
    with counted_syncs() as counts:
        loops.train_step(model, optimizer, *loops.batch())
    assert not counts
    assert len(history.passes) == 2


# -- what becomes of it ----------------------------------------------------------------------


@pytest.fixture
def history():
    model, optimizer = loops.prepared("O4", loss_scale="dynamic")
    with amp.debug.History(optimizer) as collected:
        loops.train(model, optimizer, data=loops.batches(3, overflow_at={1}))
    return collected


def test_json_holds_every_pass(history):
    records = json.loads(history.to_json())
    assert [record["loss_scale"] for record in records] == [2.0**16, 2.0**15, 2.0**15]
    assert records[1]["grad_norm"] is None
    assert records[0]["grad_norm"] == history.passes[0].grad_norm


def test_tensorboard_receives_every_number(history):
    class Writer:
        def __init__(self):
            self.added = []

        def add_scalar(self, tag, value, step):
            self.added.append((tag, value, step))

    writer = Writer()
    history.to_tensorboard(writer, prefix="run")
    assert ("run/loss_scale/0", 2.0**15, 1) in writer.added
    assert ("run/overflow/0", 1, 1) in writer.added
    assert ("run/grad_norm/0", history.passes[2].grad_norm, 2) in writer.added


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [amp.debug.History, amp.debug.arm])
def test_what_watches_a_loss_scale_of_amp_refuses_a_plain_optimizer(tool):
    with pytest.raises(ValueError, match=r"has not prepared.*apex trace train\.py"):
        tool(loops.sgd(loops.net().parameters()))
    with pytest.raises(TypeError, match="got Linear instead of an optimizer"):
        tool(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("count", [0, 1.5, True])
def test_a_count_that_is_no_integer_of_at_least_1_is_refused(count):
    _, optimizer = loops.prepared("O4")
    with pytest.raises(ValueError, match=f"limit is {count!r}; it must be an integer"):
        amp.debug.History(optimizer, limit=count)


# -- the summary ---------------------------------------------------------------------------------


def test_the_summary_has_a_line_for_each_loss():
    model, optimizer = loops.prepared("O4", num_losses=2, loss_scale="dynamic")
    history = amp.debug.History(optimizer)
    assert str(history) == "No backward pass recorded yet."
    good, bad = loops.batch(), loops.overflowing()
    for loss_id, (x, y) in ((1, good), (0, bad), (1, bad), (0, good)):
        optimizer.zero_grad()
        loops.backward(model, optimizer, x, y, loss_id=loss_id)
    assert str(history).splitlines() == [
        "Loss 0: 2 backward passes, 1 skipped; scale 32768, from 32768 to 32768; "
        f"gradient norm {history.passes[3].grad_norm:.3g}, at most "
        f"{history.passes[3].grad_norm:.3g}",
        "Loss 1: 2 backward passes, 1 skipped; scale 32768, from 32768 to 65536; "
        f"gradient norm {history.passes[2].grad_norm}, at most {history.passes[0].grad_norm:.3g}",
    ]
