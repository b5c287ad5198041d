"""What ``explain`` reports, against counts made by hand."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex._torch.dispatcher import weight_cache_is_safe
from apex.debug import explain
from tests.debug.explain_cases import Body, casts_of, row_of
from tests.training.cases import net

DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")


def total(output):
    return output.float().sum()


def prepared(model, level, **options):
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


# -- dtypes, casts and FLOPs ---------------------------------------------------------------------


def test_a_plain_model_computes_in_fp32_without_casts():
    found = explain(net(), torch.randn(3, 4))
    assert found.level == "none"
    assert found.total.casts == 0
    assert found.low_precision_share == 0.0
    assert {row.computed_in for row in found.ops} == {"float32"}
    assert row_of(found, "addmm", "0").decided_by == "follows its input"


def test_flops_of_a_linear_layer_are_twice_the_product_of_its_sizes():
    found = explain(net(), torch.randn(3, 4))  # 4 -> 8 -> 2
    assert row_of(found, "addmm", "0").flops == 2 * 3 * 4 * 8
    assert row_of(found, "mm", "0", "backward").flops == 2 * 3 * 4 * 8  # the weight's gradient
    assert row_of(found, "addmm", "2").flops == 2 * 3 * 8 * 2
    assert row_of(found, "mm", "2", "backward").flops == 2 * (2 * 3 * 8 * 2)  # and the input's
    assert found.total.flops == 2 * 192 + 3 * 96


def test_o4_casts_input_weight_and_bias_of_a_linear_layer():
    found = explain(prepared(net(), "O4"), torch.randn(3, 4), loss_fn=total)
    first, second = row_of(found, "addmm", "0"), row_of(found, "addmm", "2")
    assert (first.dtypes_in, first.dtype_out) == (("bfloat16",), "bfloat16")
    values = 3 * 4 + 8 * 4 + 8
    assert casts_of(first) == {DOWN: (3, values * (4 + 2))}
    assert casts_of(second) == {DOWN: (2, (16 + 2) * 6)}  # its input is bf16 already
    assert row_of(found, "relu", "1").casts == ()
    assert casts_of(row_of(found, "sum", inside=False)) == {UP: (1, 36)}
    assert found.low_precision_share == 1.0


@pytest.mark.skipif(
    not weight_cache_is_safe, reason="this torch's weight cache loses gradients: it stays off"
)
def test_a_weight_that_the_cache_serves_twice_is_cast_once():
    twice = Body(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(4, 4, bias=False))
    found = explain(prepared(twice, "O4"), torch.randn(3, 4), backward=False)
    row = row_of(found, "mm", "layer")
    assert row.calls == 2
    assert casts_of(row) == {DOWN: (2, 28 * 6)}  # the input's and the weight's


def test_a_cast_is_charged_through_views_and_copies_to_the_operator_that_computes():
    model = Body(lambda self, x: x.half().t().contiguous().view(-1) + 1.0)
    found = explain(model, torch.randn(2, 3), backward=False)
    assert row_of(found, "clone").casts == ()
    assert casts_of(row_of(found, "add")) == {("float32", "float16"): (1, 36)}


def test_o5_casts_the_input_and_says_what_stays_fp32():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 2))
    model = prepared(model, "O5", fp32_modules=[nn.LayerNorm])
    found = explain(model, torch.randn(3, 4), backward=False)
    assert casts_of(row_of(found, "addmm", "0")) == {DOWN: (1, 72)}
    assert row_of(found, "addmm", "3").decided_by == "model converted to bfloat16"
    assert row_of(found, "native_batch_norm", "1").decided_by == "batch norm kept fp32"
    norm = row_of(found, "native_layer_norm", "2")
    assert (norm.computed_in, norm.decided_by) == ("float32", "fp32_modules")
    assert casts_of(norm) == {UP: (1, 24 * 6)}


def test_a_plain_model_under_torch_autocast_is_explained_too():
    with torch.autocast("cpu", torch.bfloat16):
        found = explain(net(), torch.randn(3, 4), loss_fn=total)
    row = row_of(found, "addmm", "0")
    assert found.level == "torch.autocast"
    assert casts_of(row) == {DOWN: (3, 312)}
    assert row.decided_by == "torch.autocast: bfloat16 (linear)"
    assert row_of(found, "relu", "1").decided_by == "follows its input"


# -- what decided --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "op", "why"),
    [
        (lambda self, x: x.softmax(-1), "_softmax", "fp32 list (softmax)"),
        (lambda self, x: F.l1_loss(x, x + 1), "abs", "fp32 list (l1_loss)"),
        (lambda self, x: x @ x.t(), "mm", "low precision list (matmul)"),
        (lambda self, x: torch.dot(x[0].double(), x[1]), "dot", "promote list (dot)"),
        (lambda self, x: x + x.bfloat16(), "add", "widest input (torch)"),
        (lambda self, x: x.tanh(), "tanh", "follows its input"),
        (lambda self, x: F.gelu(x), "gelu", "follows its input"),
        (lambda self, x: torch.fft.rfft(x), "_fft_r2c", "fp32 list (fft_rfft)"),
        (
            lambda self, x: torch.logdet(x @ x.t() + torch.eye(3)),
            "_linalg_slogdet",
            "fp32 list (logdet)",
        ),
    ],
)
def test_the_row_of_the_op_table_is_named(function, op, why):
    model = prepared(Body(function, weight=nn.Parameter(torch.ones(1))), "O4")
    found = explain(model, torch.randn(3, 4), backward=False)
    assert row_of(found, op).decided_by == why


def test_a_function_that_the_user_registered_is_named():
    amp.register_half_function(torch, "tanh")
    model = prepared(Body(lambda self, x: torch.tanh(x), weight=nn.Linear(1, 1)), "O4")
    found = explain(model, torch.randn(3, 4), backward=False)
    row = row_of(found, "tanh")
    assert (row.computed_in, row.decided_by) == (
        "bfloat16",
        "registered by you: low_precision (tanh)",
    )


def test_casts_disabled_in_the_model_are_named():
    def forward(self, x):
        with amp.disable_casts():
            return self.layer(x)

    model = prepared(Body(forward, layer=nn.Linear(4, 2)), "O4")
    row = row_of(explain(model, torch.randn(3, 4), backward=False), "addmm", "layer")
    assert (row.computed_in, row.decided_by) == ("float32", "op casts off here")


# -- the whole -----------------------------------------------------------------------------------


def test_a_module_sums_up_what_ran_in_it_and_below():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Dropout(0.0))
    found = explain(prepared(model.eval(), "O4"), torch.randn(3, 4), backward=False)
    rows = {row.name: row for row in found.modules}
    assert list(rows) == ["", "0", "0.0", "0.1", "1"]
    assert [rows[n].dtype for n in ("0", "0.0", "0.1", "1")] == ["mixed", "bfloat16", "float32", ""]
    assert rows["0"].casts == rows["0.0"].casts + rows["0.1"].casts == 4
    assert rows["0"].flops == rows["0"].low_precision_flops == 2 * 3 * 4 * 4
    assert rows[""].seconds == pytest.approx(found.total.seconds)


def test_the_loss_is_outside_the_model_and_the_default_loss_is_noted():
    found = explain(net(), torch.randn(3, 4))
    assert row_of(found, "mean", inside=False).module == ""
    assert any("mean of the floating-point outputs" in note for note in found.notes)


def test_a_checkpoint_recomputes_in_the_dtypes_of_its_forward():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    model = Body(lambda self, x: checkpoint(self.layers, x, use_reentrant=False), layers=layers)
    found = explain(prepared(model, "O4"), torch.randn(3, 4), loss_fn=total)
    rows = [row for row in found.ops if row.op == "aten.addmm"]
    assert sum(row.calls for row in rows) == 2
    assert {row.computed_in for row in rows} == {"bfloat16"}
    assert {row.decided_by for row in rows} == {"low precision list (linear)"}


def test_compiled_parts_run_eagerly():
    model = prepared(net(), "O4")
    model[0].compile(backend="eager")
    found = explain(torch.compile(model, backend="eager"), torch.randn(3, 4), backward=False)
    assert row_of(found, "addmm", "0").decided_by == "low precision list (linear)"


@pytest.mark.gpu
def test_on_a_gpu_the_dtypes_are_the_same_and_time_is_measured():
    model = prepared(net().cuda(), "O4")
    found = explain(model, torch.randn(3, 4, device="cuda"), loss_fn=total)
    assert casts_of(row_of(found, "addmm", "0")) == {DOWN: (3, 312)}
    assert found.total.seconds > 0.0


def test_a_class_is_no_loss_function():
    with pytest.raises(TypeError, match="explain got the class MSELoss as loss_fn; it takes a"):
        explain(net(), torch.randn(3, 4), loss_fn=nn.MSELoss)


# -- text and JSON ---------------------------------------------------------------------------------


def test_text_and_json_hold_the_same(tmp_path):
    found = explain(prepared(net(), "O4"), torch.randn(3, 4))
    text = str(found)
    assert text.startswith("Sequential, explained: level O4\n  100 % of ")
    assert "low precision list (linear)" in text
    data = json.loads(found.to_json())
    assert data["total"]["casts"] == found.total.casts
    assert len(data["ops"]) == len(found.ops)
    for suffix in (".json", ".txt"):
        found.save(tmp_path / f"found{suffix}")
        assert "addmm" in (tmp_path / f"found{suffix}").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"found\.html.*\.json, \.txt"):
        found.save(tmp_path / "found.html")
