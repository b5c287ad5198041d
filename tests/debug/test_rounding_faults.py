"""A rounding trace names the module and operator that lose digits, and accuses no healthy one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.debug import rounding_cases
from tests.debug.bodies import Body
from tests.debug.rounding_cases import FAULTS, HEALTHY, MODES, Training, mlp, sample, traced
from tests.support.loops import every

KERNELS = {"aten.mkldnn_rnn_layer_backward"}
"""Healthy operators without a verdict: their workspace is of the kernel in 16 bits."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_planted_operator_is_named(fault):
    faulty, length, ops, direction = FAULTS[fault]
    for mode in MODES if length < 300 else ("O4", "bf16"):
        torch.manual_seed(0)
        training = Training(rounding_cases.around(faulty), mode)
        trace = training.traced(*sample(training.model, length))
        worst = trace.worst
        assert (worst.module, worst.direction) == ("faulty", direction), mode
        assert worst.op in ops.split()
        assert worst.error > worst.tolerance > worst.inherited
        assert worst.location.split(":")[0].endswith("rounding_cases.py")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_loses_none(name):
    fp16 = ("O1",) if name == "mlp" else ()  # emulated on most CPUs, and slow
    for seed, mode in enumerate((*MODES, *fp16)):
        if not rounding_cases.runs(name, mode):
            continue
        torch.manual_seed(seed)
        training = Training(HEALTHY[name](), mode)
        with amp.debug.trace_rounding(training.model) as trace:
            for _ in range(2):
                training.step(*sample(training.model))
        assert trace.worst is None, f"{mode}: {trace}"
        assert {each.op for each in trace.skipped} <= KERNELS
        assert trace.operators > 20


LOSSES = {
    "mean": lambda output, _: output.mean(),
    "sum of a softmax": lambda output, _: output.softmax(-1).sum(),
    "low": lambda output, targets: F.cross_entropy(output.bfloat16(), targets),
    "mean of a norm": lambda output, _: F.layer_norm(output, output.shape[-1:]).mean(),
    "equal classes": lambda output, _: (1e-3 * output).log_softmax(-1).mean(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_that_vanish_by_construction_or_by_chance_are_no_fault(loss):
    """A sum after a batch norm has no gradient; a mean of both signs is small by chance."""
    for seed, mode in enumerate(MODES * 2):
        torch.manual_seed(seed)
        training = Training(mlp(norm=nn.BatchNorm1d, depth=2), mode, loss)
        trace = training.traced(*sample(training.model))
        assert trace.worst is None, str(trace)


@pytest.mark.parametrize("scale", [2.0**14, 2.0**17], ids=["sums", "the gradient's cast"])
def test_nothing_is_accused_behind_an_overflow(scale):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).half()
    with amp.debug.trace_rounding(model) as trace:
        output = model(torch.randn(16, 8, dtype=torch.float16))
        (output.float().square().sum() * scale).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert trace.worst is None, str(trace)
    assert {each.op for each in trace.skipped} <= {"aten.mm", "aten.sum", "aten._to_copy"}
    assert "inf or NaN where fp32 does not; `apex trace` (trace" in trace.skipped[0].reason
    assert f"within tolerance; {len(trace.skipped)} without a verdict." in str(trace)


def test_a_gradient_without_a_sum_is_not_accused_behind_an_overflow_in_another_column():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with amp.debug.trace_rounding(model) as trace, torch.autocast("cpu", torch.float16):
        output = model(torch.randn(16, 8))
        targets = torch.randn(16, 8)
        targets[0, 0] = torch.inf
        (output * targets).sum().backward()
    assert trace.worst is None, str(trace)


SCALES = [
    lambda x: (x + 1) * 0.999,
    lambda x: x.clone().fill_diagonal_(0.0) * 0.999,
    lambda x: x.mul_(0.999),
]


@pytest.mark.parametrize("scale", SCALES)
def test_an_activation_times_a_number_close_to_1_is_no_average(scale):
    body = Body(lambda self, x: scale(x))
    model = nn.Sequential(nn.Linear(16, 16), body, nn.Linear(16, 4)).bfloat16()
    for grad in (True, False):
        with amp.debug.trace_rounding(model) as trace, torch.set_grad_enabled(grad):
            output = model(torch.randn(8, 16, dtype=torch.bfloat16))
            if grad:
                output.float().square().sum().backward()
        assert trace.worst is None, str(trace)


SHIFTS = [(16.0, "lost"), (1e3, "lost"), (1e6, "skipped"), (1e7, "skipped")]


@pytest.mark.parametrize(("shift", "found"), SHIFTS)
def test_a_difference_that_cancels_in_fp32_too_is_not_called_healthy(shift, found):
    body = Body(lambda self, x: (x + shift) - shift)
    model = nn.Sequential(nn.Linear(8, 8), body, nn.Linear(8, 4)).bfloat16()
    trace = traced(model, torch.randn(4, 8, dtype=torch.bfloat16))
    assert [(each.module, each.op) for each in getattr(trace, found)] == [("1", "aten.sub")]
    assert len(trace.lost) + len(trace.skipped) == 1
    assert found == "lost" or "fp32 holds hardly a digit" in trace.skipped[0].reason


@pytest.mark.parametrize(("momentum", "op"), [(1e-3, "aten.native_batch_norm"), (0.1, None)])
def test_a_running_mean_that_stands_still_is_named(momentum, op):
    norm = nn.BatchNorm1d(8, momentum=momentum).bfloat16()
    norm.running_mean.fill_(3.0)
    with amp.debug.trace_rounding(norm) as trace:
        norm(torch.randn(16, 8, dtype=torch.bfloat16) + 4)
    assert bool((norm.running_mean == 3.0).all()) == (op is not None)
    assert getattr(trace.worst, "op", None) == op
    assert op is None or trace.worst.kind == "lost update"


UPDATES = [
    lambda average, new: average.mul_(0.999).add_(new, alpha=0.001),
    lambda average, new: average.lerp_(new, 0.001),
    lambda average, new: torch._foreach_lerp_([average], [new], 0.001),
    lambda average, new: average.copy_(0.999 * average + 0.001 * new),
]


@pytest.mark.parametrize("update", UPDATES)
def test_an_average_of_weights_that_stands_still_is_named(update):
    model = nn.Linear(8, 8).bfloat16()
    average = copy.deepcopy(model)
    with amp.debug.trace_rounding(model) as trace:
        for _ in range(2):
            model(torch.randn(4, 8, dtype=torch.bfloat16)).float().sum().backward()
            with torch.no_grad():
                update(average.weight, model.weight * 1.1)
    assert trace.worst.kind == "lost update"
    assert trace.worst.op in ("aten.mul_", "aten.lerp_", "aten.mul")


@pytest.mark.parametrize(("argument", "found"), [("probs", "aten.log"), ("logits", None)])
def test_a_clamp_by_the_eps_of_16_bits_is_named(argument, found):
    """By torch's categorical distribution of probabilities."""
    torch.manual_seed(0)
    logits = (6 * torch.randn(16, 6)).bfloat16().requires_grad_()
    with amp.debug.trace_rounding() as trace:
        given = logits.softmax(-1) if argument == "probs" else logits
        policy = torch.distributions.Categorical(**{argument: given})
        policy.log_prob(torch.arange(16) % 6).mean().backward()
    assert (trace.worst and trace.worst.op) == found


def test_a_loss_of_large_logits_is_named():
    for mode in ("bf16", "O5"):
        training = Training(mlp(), mode, lambda y, z: F.cross_entropy(y.bfloat16() + 500, z))
        trace = training.traced(*sample(training.model))
        assert (trace.worst.op, trace.worst.module) == ("aten._log_softmax", "")
        assert not trace.worst.inside


# -- programs without a fault --------------------------------------------------------------------


def values_beside_exact_ones():
    """Inherit an error, however they are joined."""
    output = nn.Linear(16, 16).bfloat16()(torch.randn(64, 16, dtype=torch.bfloat16))
    x, exact = (output * 4).exp().square().square().square(), torch.ones_like(output)
    by_parts = torch.empty(2, *x.shape, dtype=x.dtype)
    by_parts[0] = x
    by_parts[1] = exact
    by_parts + 1
    torch.stack([x, 1e30 * exact])[0] + 1
    torch.add(x.detach(), exact, out=1e30 * exact)


def two_means_that_nearly_cancel():
    critic, x = mlp(nn.Tanh, depth=2).half(), torch.randn(16, 32).half()
    (critic(x).mean() - critic(x + 0.5).mean()).backward()


def values_that_cancel_in_a_fused_attention():
    """Near-equal values at the beginning of a training, as of GPT-2."""
    projection = nn.Linear(32, 96).bfloat16()
    nn.init.normal_(projection.weight, std=0.02)
    for mask in (None, torch.zeros(64, 64, dtype=torch.bfloat16)):
        x = torch.randn(2, 64, 32, dtype=torch.bfloat16)
        q, k, v = projection(x).view(2, 64, 3, 4, 8).permute(2, 0, 3, 1, 4)
        causal = mask is None
        output = F.scaled_dot_product_attention(q, k, v + 1, attn_mask=mask, is_causal=causal)
        (output.float() * torch.randn(2, 4, 64, 8)).sum().backward()


def two_means_that_nearly_cancel_and_are_scaled():
    critic = nn.Linear(2, 1, bias=False).bfloat16()
    nn.init.ones_(critic.weight)
    for loss in (lambda a, b: b - a, lambda a, b: -a + b):
        real = critic(torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)).float().mean()
        fake = critic(torch.tensor([[1.0, 2.0**-5]], dtype=torch.bfloat16)).float().mean()
        (loss(real, fake) * 0.5 + loss(real, fake) / 30).backward()
    assert float(loss(real, fake).detach()) == 2.0**-5  # 2**-9 is lost: 6.7 % of the difference


def a_token_that_recurs_in_fp16():
    output = nn.Embedding(2, 8).half()(torch.zeros(4096, dtype=torch.long))
    (output * (torch.rand(4096, 8) + 0.5).half()).float().sum().backward()


def a_gru_near_its_fixed_point():
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = nn.GRU(8, 8)(torch.ones(40, 4, 8))
        output.float().square().mean().backward()


def complex_values():
    def turn(x):
        angles = torch.polar(torch.ones(4), torch.arange(4.0))
        turned = torch.view_as_complex(x.float().unflatten(-1, (4, 2))) * angles
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    model = nn.Sequential(nn.Linear(8, 8), rounding_cases.layer(turn), nn.Linear(8, 8)).bfloat16()
    model(torch.randn(4, 8).bfloat16()).square().sum().backward()


def tensors_without_elements():
    (torch.ones(0, 2).bfloat16() + 1).sum()


def a_weight_times_a_number():
    """It is no average that stands still."""
    linear, weight = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).bfloat16().weight
    F.linear(linear(torch.ones(4, 8).bfloat16()), weight * 0.999).square().sum().backward()


PROGRAMS = [
    values_beside_exact_ones, two_means_that_nearly_cancel, a_token_that_recurs_in_fp16,
    values_that_cancel_in_a_fused_attention, two_means_that_nearly_cancel_and_are_scaled,
    a_gru_near_its_fixed_point, complex_values, tensors_without_elements, a_weight_times_a_number,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_a_fault_is_judged_and_not_accused(program):
    torch.manual_seed(0)
    with amp.debug.trace_rounding() as trace:
        program()
    assert trace.lost == trace.skipped == (), str(trace)


# -- faults of their own -------------------------------------------------------------------------


def test_the_report_says_where_the_error_enters():
    def rotated(self, x):
        angles = times.float()[:, None] * torch.ones(8)
        return x + angles.cos().to(x.dtype)

    torch.manual_seed(0)
    model = Body(rotated)
    with amp.debug.trace_rounding(model) as trace:
        times = torch.tensor([987.3, 301.6, 701.1, 998.4]).to(torch.bfloat16)
        model(torch.randn(4, 8, dtype=torch.bfloat16))
    assert trace.worst.op == "aten.cos"
    ((label, text),) = trace.worst.notes
    assert label == "from"
    assert text.startswith("aten._to_copy, where the error enters")
    assert text.endswith("times = torch.tensor([987.3, 301.6, 701.1, 998.4]).to(torch.bfloat16)")
    assert trace.worst.remedies[0].startswith(f"keep the value in fp32 at {__file__}:")


def test_a_row_carries_its_worst_call():
    def shifted(self, x):
        for shift in (30.0, 3000.0, 300.0):
            y = (x + shift) - shift
        return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Body(shifted)).bfloat16()
    with amp.debug.trace_rounding(model) as trace:
        model(torch.randn(4, 8, dtype=torch.bfloat16))
    assert trace.worst.error > 0.9  # that of the first call is 0.1


REGRESSIONS = [F.mse_loss, F.smooth_l1_loss, lambda output, y: ((output - y) ** 2).mean()]


@pytest.mark.parametrize("loss", REGRESSIONS)
def test_the_residual_of_a_regression_is_no_fault(loss):
    for mode in MODES:
        torch.manual_seed(0)
        training = Training(mlp(depth=1), mode, lambda output, y: loss(output.float(), y))
        training.optimizer.param_groups[0]["lr"] = 1e-2
        weight = torch.randn(32, 10) / 6
        for step in range(60):
            x = torch.randn(32, 32)
            if step < 58:
                training.step(x, x @ weight)
                continue
            trace = training.traced(x, x @ weight)
            assert trace.worst is None, f"{mode}: {trace}"


@pytest.mark.parametrize("value", [-1e4, -torch.inf, "least"])
def test_a_row_that_is_masked_as_a_whole_is_no_fault(value):
    def attend(self, x):
        scores = self.linear(x) @ x.mT
        least = torch.finfo(scores.dtype).min if value == "least" else value
        mask = torch.zeros(8, 8, dtype=scores.dtype)
        mask[0] = least
        mask[:, 5:] = least
        return (scores + mask).softmax(-1).nan_to_num(0.0) @ x

    for mode in ("O4", "bf16"):
        torch.manual_seed(0)
        model = Body(attend, linear=nn.Linear(16, 16))
        training = Training(model, mode, lambda output, _: output.float().square().mean())
        trace = training.traced(torch.randn(4, 8, 16), None)
        assert trace.worst is None, f"{mode}: {trace}"


@every(calls=[1, 60], count=[lambda n: n.add_(1), lambda n: n + 1])
def test_a_counter_that_stands_still_is_named(count, calls):
    with amp.debug.trace_rounding() as trace:
        n = torch.full((), 256.0, dtype=torch.bfloat16)
        for _ in range(calls):
            n = count(n)
    assert trace.worst.kind == "lost update"
    assert "half a step of bfloat16" in trace.worst.why


def lost_by(formula):
    """Returns the rows of a formula in a model, on values that bf16 rounds."""
    body = Body(lambda self, x: formula(x.bfloat16()))
    with amp.debug.trace_rounding(body) as trace:
        body(torch.linspace(4, 5, 64))
    return trace.lost


def test_a_difference_in_fp32_that_brings_an_error_back_is_not_accused():
    """Such as the flow, from coordinates to which it was added."""
    start = torch.full((64,), 1e3)
    rows = lost_by(lambda x: (start + (x - 4.25).tanh()) - start)
    assert [row.dtype for row in rows] == ["bfloat16"]


def test_what_fp32_magnifies_in_two_steps_is_no_chain_and_comes_from_16_bits():
    row, *_ = lost_by(lambda x: (x.float() - 4) - 0.5)
    assert (row.kind, row.dtype) == ("cancellation", "float32")
    assert row.remedies[0].startswith("keep the value in fp32 at ")


def test_an_error_of_large_logits_counts_by_the_probabilities_that_it_changes():
    (row,) = lost_by(lambda x: (x.float() * 100).log_softmax(-1))
    assert (row.op, row.kind) == ("aten._log_softmax", "cancellation")


HARMLESS = {
    "logits of usual size": lambda x: (x.float() * 3).softmax(-1),
    "logits beside masked ones": lambda x: (
        (x.float() * 3 + torch.tensor([[0.0], [-1e9]])).view(-1).softmax(-1)
    ),
    "a small head": lambda x: F.linear(x.view(64, 1), x.new_ones(1, 1), x.new_full((1,), -4.5)),
}


@pytest.mark.parametrize("formula", HARMLESS.values(), ids=HARMLESS)
def test_what_is_steep_or_small_by_design_or_chance_is_not_accused(formula):
    assert lost_by(formula) == ()


def test_values_below_0_that_are_all_large_are_no_mask():
    row, *_ = lost_by(lambda x: (1e6 - x * 500) - 1e6)
    assert (row.op, row.kind) == ("aten.sub", "cancellation")
