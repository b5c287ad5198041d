"""What ``explain`` reports, against counts made by hand, and that it changes nothing."""

import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from apex import amp
from apex.debug import explain
from tests.debug.bodies import Body, everything
from tests.support.loops import InBackward, Recomputed, net, prepared, same, train, train_step

LOW, FULL = "bfloat16", "float32"
X = torch.ones(3, 4)


def total(output):
    return output.float().sum()


def at(level, model=None, **options):
    return amp.initialize(model or net(), opt_level=level, verbosity=0, **options)


def row_of(found, op, module="", direction="forward", inside=True):
    """Returns the one row of an operator."""
    place = (f"aten.{op}", module, direction, inside)
    rows = [r for r in found.ops if (r.op, r.module, r.direction, r.inside) == place]
    assert len(rows) == 1, [f"{r.direction} {r.module} {r.op}" for r in found.ops]
    return rows[0]


def casts_in(found, module, **place):
    row = row_of(found, "_to_copy", module, **place)
    return row.dtypes_in[0], row.dtype_out, row.calls, row.cast_bytes


def test_a_plain_model_computes_in_fp32_without_casts():
    found = explain(net(), torch.randn(3, 4))
    assert found.total[1:] == (0.0, 0, 0)
    assert {row.computed_in for row in found.ops} == {FULL}
    assert row_of(found, "mean", inside=False).module == ""  # the default loss
    found = explain(net(), X, loss_fn=total, backward=False)
    assert row_of(found, "sum", inside=False).calls == 1


def test_o4_casts_input_weight_and_bias_of_a_linear_layer():
    found = explain(at("O4"), torch.randn(3, 4), loss_fn=total)
    first = row_of(found, "addmm", "0")
    assert (first.dtypes_in, first.dtype_out, first.calls) == ((LOW,), LOW, 1)
    assert casts_in(found, "0") == (FULL, LOW, 3, (3 * 4 + 8 * 4 + 8) * 6)
    assert casts_in(found, "2") == (FULL, LOW, 2, (16 + 2) * 6)  # its input is bf16 already
    assert casts_in(found, "", inside=False) == (LOW, FULL, 1, 36)
    low = [row.seconds for row in found.ops if row.computed_in == LOW and not row.cast_bytes]
    assert 0.0 < found.total.low_precision_seconds == math.fsum(low) < found.total.seconds
    with torch.autocast("cpu", torch.bfloat16):
        assert casts_in(explain(net(), torch.randn(3, 4)), "0") == casts_in(found, "0")
    assert found.total.casts == sum(row.calls for row in found.ops if row.cast_bytes)


def test_o5_casts_the_input_and_keeps_in_fp32_what_it_is_told():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 2))
    model = at("O5", model, fp32_modules=[nn.LayerNorm])
    found = explain(model, torch.randn(3, 4), backward=False)
    casts = [(row.module, row.dtypes_in[0], row.dtype_out) for row in found.ops if row.cast_bytes]
    assert casts[:2] == [("", FULL, LOW), ("2", LOW, FULL)]
    assert row_of(found, "addmm", "3").computed_in == LOW
    assert row_of(found, "native_layer_norm", "2").computed_in == FULL


def test_what_amp_computes_by_itself_is_no_part_of_the_model():
    model, optimizer = prepared("O5")
    inputs = torch.randn(3, 4)
    before = [(row.op, row.calls) for row in explain(model, inputs).ops]
    train(model, optimizer, 2)  # from then on, amp compares weights with their masters
    assert [(row.op, row.calls) for row in explain(model, inputs).ops] == before


def test_what_amp_looks_for_in_a_forward_is_no_part_of_the_model():
    """Weights that others write, and whole numbers in arguments."""
    model = Body(lambda self, x: self.linear(x), linear=nn.Linear(4, 2).requires_grad_(False))
    found = explain(at("O5", model), 1000.0 * X + 1.0, backward=False)
    assert {row.op for row in found.ops} == {"aten._to_copy", "aten.addmm"}


def test_text_and_json_hold_the_same():
    found = explain(at("O4"), torch.randn(3, 4))
    text, data = str(found), json.loads(found.to_json())
    assert text.startswith("Sequential: ")
    assert f"{found.total.casts} casts" in text
    assert "addmm" in text
    assert "(outside)" in text  # the loss
    assert data["total"]["casts"] == found.total.casts
    assert len(data["ops"]) == len(found.ops)
    assert "rows omitted" in found.to_text(rows=2)


def test_the_longest_rows_are_shown_in_order_of_use():
    found = explain(net(), X, backward=False)
    rows = zip(found.ops, (2.0, 1.0, 3.0), strict=True)
    timed = replace(found, ops=tuple(replace(row, seconds=seconds) for row, seconds in rows))
    assert [line[0] for line in timed.to_text(rows=2).splitlines()[3:5]] == ["0", "2"]


# -- nothing changes -------------------------------------------------------------------------------


def noisy(fails):
    """A model that changes buffers and its input, and draws random numbers of every kind."""

    def forward(self, x):
        x = self.norm(self.layer(x.mul_(2))) * random.random() * np.random.rand()
        self.register_buffer(f"cache_{int(self.count)}", x)
        self.count += 1
        self.seen = self.seen + 1
        if fails[0]:
            raise KeyError("the model's own")
        return self.drop(x)

    layers = {"layer": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "drop": nn.Dropout(0.5)}
    model = Body(forward, **layers)
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("seen", torch.zeros(()))
    return model


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
@pytest.mark.parametrize("raises", [False, True], ids=["", "raises"])
def test_nothing_changes(level, raises):
    fails = [False]
    model, optimizer = prepared(level, model=noisy(fails))
    train_step(model, optimizer, torch.randn(3, 4), torch.randn(3, 4))
    fails[0] = raises
    buffers = dict(model.named_buffers())
    x = torch.randn(3, 4)
    before, given, scales = everything(model), x.clone(), amp.state_dict()
    grads = [param.grad for param in model.parameters()]
    dtypes = [grad.dtype for grad in grads]
    with pytest.raises(KeyError, match="the model's own") if raises else nullcontext():
        assert explain(model, x).ops
    assert same((everything(model), x), (before, given))
    assert amp.state_dict() == scales
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert [grad.dtype for grad in grads] == dtypes


def test_casts_are_off_in_a_backward_pass_as_in_scale_loss():
    def multiplied(grad):
        return grad.float() @ torch.eye(4)

    model = Body(lambda self, x: InBackward.apply(x * self.w, multiplied), w=nn.Parameter(X))
    with torch.autocast("cpu", torch.bfloat16):
        found = explain(model, X)
    assert row_of(found, "mm", direction="backward").dtype_out == FULL


def test_a_forward_that_a_backward_pass_runs_again_is_cast_as_in_scale_loss():
    """As of reversible networks."""

    def forward(self, x):
        return Recomputed.apply(self.layer, False, x * self.w)

    model = Body(forward, layer=nn.Linear(4, 4), w=nn.Parameter(torch.ones(4)))
    found = explain(amp.initialize(model, opt_level="O4", verbosity=0), X)
    assert {row.dtypes_in for row in found.ops if row.op == "aten.addmm"} == {("bfloat16",)}


def test_a_pending_graph_of_the_user_can_still_go_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(3, 4)).sum()
        for backward in (True, False):
            explain(model.train(), torch.randn(3, 4), backward=backward)
        again = model(torch.randn(3, 4)).sum()
    loss.backward()
    model.zero_grad()
    again.backward()
    assert model[0].weight.grad is not None


BAD = {
    "takes a torch.nn.Module": lambda: explain(lambda x: x, torch.ones(1)),
    "got the class MSELoss as loss_fn": lambda: explain(net(), X, loss_fn=nn.MSELoss),
    "'weight' has no values": lambda: explain(nn.Linear(4, 2, device="meta"), X),
    r"shape \(3, 2\).*Reduce it in loss_fn": lambda: explain(net(), X, loss_fn=lambda out: out),
    "loss_fn returned float": lambda: explain(net(), X, loss_fn=lambda out: 1.0),
    "Pass backward=False": lambda: explain(net().requires_grad_(False), X),
    "holds no floating-point tensor": lambda: explain(Body(lambda self, x: x.argmax()), X),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_explained(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD[message]()


def test_an_operator_without_inputs_computes_in_its_result_and_integers_do_not_count():
    class Fresh(nn.Module):
        def forward(self, x):
            return x[torch.arange(3)] + torch.ones(3, dtype=torch.bfloat16)

    found = explain(Fresh(), torch.randn(3), backward=False)
    assert [row.computed_in for row in found.ops if not row.dtypes_in] == ["bfloat16"]
    assert found.total.casts == 0


def test_a_copy_in_the_same_dtype_is_no_cast_and_takes_no_time_if_nothing_else_ran():
    found = explain(Body(lambda self, x: x.to(x.dtype, copy=True)), X, backward=False)
    assert (row_of(found, "_to_copy").calls, found.total.casts) == (1, 0)
    assert "0 % of the time in 16 bits" in str(explain(nn.Identity(), X, backward=False))


def test_a_model_that_keeps_its_state_with_its_graph_keeps_what_it_had():
    def forward(self, x):
        self.state = (self.layer(x) + self.state).tanh()
        return self.state

    model = Body(forward, layer=nn.Linear(4, 4))
    model.state = state = torch.zeros(len(X), 4)
    assert row_of(explain(model, X), "tanh").calls == 1
    assert model.state is state


def test_arguments_and_buffers_may_be_expanded():
    model = Body(lambda self, x: (x + self.row).square())
    model.register_buffer("row", X[:1].expand(len(X), -1))
    assert row_of(explain(model, X[:1].expand(len(X), -1), backward=False), "add").calls == 1


def test_statistics_in_fp32_leave_a_batch_norm_in_16_bits():
    found = explain(nn.BatchNorm1d(4), X.bfloat16())
    assert row_of(found, "native_batch_norm").computed_in == "bfloat16"


def test_the_gradient_of_an_input_that_requires_one_is_counted():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert explain(frozen, X, loss_fn=total, backward=False).ops
    with torch.no_grad():
        found = explain(frozen, X.clone().requires_grad_())
    assert row_of(found, "mm", direction="backward").calls == 1


class Counting(nn.Module):
    """Gives its buffer another tensor in each run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x * self.count


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_a_scripted_model_gets_its_buffers_back():
    model = torch.jit.script(Counting())
    explain(model, X, backward=False)
    assert model.count == 0
