"""What an overflow trace reports, and that it changes nothing and leaves nothing behind."""

import json

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.debug.overflow import trace_overflow
from tests.debug import bodies
from tests.support import loops
from tests.support.features import TORCH_VERSION
from tests.support.memory import new_memory_holds_nan

EXP = f"{bodies.__file__}:{bodies.Exp.forward.__code__.co_firstlineno + 1}"


def trace_of(net):
    with trace_overflow(net) as trace:
        net(torch.ones(1, 2)).sum().backward()
    return trace


def test_the_report_names_module_line_cause_and_remedy():
    trace = trace_of(bodies.overflowing_net())
    lines = str(trace).splitlines()
    assert lines[0].startswith("First overflow: aten.exp in 1, forward, returned inf in float32")
    assert lines[1] == f"  at     {EXP}"
    assert lines[4].startswith("  cause  range: the true result, ")
    assert lines[-1] == "  hit    the gradients of 0.bias, 0.weight"
    first = json.loads(trace.to_json())["first"]
    for name in ("module", "op", "direction", "kind", "location", "cause", "pattern", "source"):
        assert first[name] == getattr(trace.first, name)
    assert json.loads(trace_of(nn.Linear(2, 2)).to_json())["first"] is None


def test_remedies_under_amp_init_are_those_of_its_level():
    amp.init()
    model = nn.Linear(4, 4)
    with trace_overflow(model) as trace:
        output = model(torch.full((2, 4), 6e4))
        (output @ output.T).sum().backward()
    assert trace.first.cause == "range"
    remedies = " ".join(trace.first.remedies)
    assert "amp.disable_casts" in remedies
    assert "torch.autocast" not in remedies


def test_remedies_for_a_plain_model_beside_a_prepared_one_are_its_own():
    beside = loops.prepared("O1", model=nn.Linear(4, 4))
    model = nn.Linear(4, 4)
    with trace_overflow(model) as trace, torch.autocast("cpu", torch.float16):
        output = model(torch.full((2, 4), 6e4))
        (output @ output.T).sum().backward()
    assert "torch.autocast" in " ".join(trace.first.remedies)
    del beside


def test_a_trace_in_which_nothing_ran_is_no_clean_one():
    trace = amp.debug.trace_overflow(nn.Linear(2, 2))
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert "Nothing traced" in str(trace)
    assert "with amp.debug.trace_overflow(model)" in str(trace)


def test_a_skip_that_finds_the_scale_hides_no_fault_behind_it():
    net, optimizer = loops.prepared("O1", model=nn.Linear(2, 2))
    with trace_overflow(net) as trace:
        loops.scaled_backward((net(torch.ones(1, 2)).float() * 1e2).sum(), optimizer)
        assert (trace.first.cause, trace.first.heals) == ("loss scale", True)
        assert trace.first.remedies[0].startswith("none with a dynamic scale, ")
        loops.scaled_backward((net(torch.ones(1, 2)).float() * 0).sqrt().sum(), optimizer)
    assert (trace.first.op, trace.first.cause) == ("aten.div", "derivative")
    assert (
        trace.first.source
        == "loops.scaled_backward((net(torch.ones(1, 2)).float() * 0).sqrt().sum(), optimizer)"
    )


@pytest.mark.parametrize("weights", [[0.1, 0.4, 1.6], [0.0, 1.0]])
def test_weights_that_have_grown_since_the_first_step_are_a_training_that_diverges(weights):
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, weights[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with trace_overflow(net) as trace:
        for weight in weights[1:]:
            net.weight.grad = net.weight.detach() - weight
            optimizer.step()
        (net(torch.ones(1, 1)).half() * 1e5).sum().backward()
    assert ("diverges" in trace.first.why) is (len(weights) > 2)


def test_memory_that_is_written_anew_forgets_what_it_held():
    net = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with trace_overflow(net) as trace:
        x.div_(0.0)
        x.fill_(1.0)
        x.numpy()[0, 0] = torch.nan  # unseen by torch, as from another process
        net(x).sum().backward()
    assert trace.first.cause == "data"


def test_data_of_0_and_inf_are_no_mask():
    net, x = nn.Linear(2, 2), torch.tensor([[0.0, torch.inf]])
    with trace_overflow(net) as trace:
        net(x).sum().backward()
    assert (trace.first.op, trace.first.cause) == ("aten.addmm", "data")


def test_a_write_to_a_part_of_a_memory_leaves_the_birth_of_the_rest():
    x = torch.full((2, 2), 2e19, requires_grad=True)
    with trace_overflow() as trace:
        rows = torch.zeros(2, 2)
        rows[0] = x[0].square()
        rows[1] = x[1]
        rows.sum().backward()
    assert (trace.first.op, trace.first.cause) == ("aten.pow", "range")


def test_a_weight_that_the_script_multiplies_is_updated():
    net = nn.Linear(2, 2)
    with trace_overflow(net) as trace, torch.no_grad():
        net.weight.fill_(2.0)
        net.weight.mul_(3e38)
    assert (trace.first.op, trace.first.cause) == ("aten.mul_", "update")


def test_three_gradients_are_listed_and_no_more():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with trace_overflow(net) as trace:
        (net(torch.ones(1, 2)) * torch.inf).sum().backward()
    assert str(trace).endswith("  hit    the gradients of 1.weight, 0.bias, 0.weight")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when dynamo is imported
def test_models_run_uncompiled_until_the_last_trace_ends():
    compiled = []
    net = torch.compile(nn.Linear(2, 2), backend=lambda graph, _: compiled.append(1) or graph)
    with amp.debug.trace_rounding(net):
        with trace_overflow(net):
            net(torch.ones(1, 2))
        net(torch.ones(1, 2))
    assert compiled == []
    net(torch.ones(1, 2))
    assert compiled == [1]


def test_what_a_hook_of_a_parameter_computes_is_no_gradient():
    net, seen = nn.Linear(2, 2), []
    net.weight.register_post_accumulate_grad_hook(lambda w: seen.append((w.grad * 0).log()))
    with trace_overflow(net) as trace:
        net(torch.ones(1, 2)).sum().backward()
    assert trace.gradients == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_a_static_scale_does_not_heal(level):
    net, optimizer = loops.prepared(level, model=nn.Linear(2, 2), loss_scale=2.0**24)
    with trace_overflow(net) as trace:
        loops.scaled_backward(net(torch.ones(1, 2)).float().sum(), optimizer)
    assert (trace.first.cause, trace.first.heals) == ("loss scale", False)


def test_an_overflow_that_a_step_by_hand_writes_into_weights_heals_no_more():
    net = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with trace_overflow(net) as trace:
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.ones(1, 2)).float().sum()
        scaler.scale(loss).backward()
        assert trace.first.heals
        with torch.no_grad():
            net.weight -= net.weight.grad / scaler.get_scale()
    assert (trace.first.cause, trace.first.heals) == ("loss scale", False)


def test_an_overflow_of_a_tensor_that_is_too_large_to_copy_is_named_without_its_values():
    with trace_overflow() as trace:
        torch.full((1,), 2e19).expand(2**24 + 1).square()
    assert (trace.first.cause, trace.first.inputs) == ("range", ())


def test_an_overflow_in_an_evaluation_neither_counts_nor_hides_a_fault():
    net = nn.Linear(2, 2)
    with trace_overflow(net) as trace:
        with torch.no_grad():
            (net(torch.ones(1, 2)).half() + 12.0).exp().clamp(max=1.0)
        net(torch.ones(1, 2)).sum().backward()
        assert trace.first is None, str(trace)
        (net(torch.ones(1, 2)) * 0).log().sum().backward()
    assert (trace.first.op, trace.first.cause) == ("aten.log", "domain")


def test_parameters_without_values_disturb_no_trace():
    used, lazy, meta = nn.Linear(2, 2), nn.LazyLinear(2), nn.Linear(2, 2, device="meta")
    net = bodies.Body(lambda self, x: self.used(x), used=used, lazy=lazy, meta=meta)
    optimizer = torch.optim.SGD(net.used.parameters(), 0.1)
    with trace_overflow(net) as trace:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        net(torch.ones(1, 2) * torch.inf).sum().backward()
    assert trace.first.cause == "constant"


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("tool", ["trace_overflow", "trace_rounding"])
def test_transforms_of_torch_func_and_control_flow_run_under_a_trace(tool):
    net = nn.Linear(2, 1)

    def loss(params, x):
        return functional_call(net, params, (x,)).log().sum()

    params = {name: param.detach() * 0 for name, param in net.named_parameters()}
    with getattr(amp.debug, tool)() as trace:
        hessian(lambda x: net(x).square().sum())(torch.ones(2))
        vmap(grad(loss), (None, 0))(params, torch.ones(3, 2))
        jvp(lambda x: x * 2, (net(torch.ones(2)),), (torch.ones(1),))
        if TORCH_VERSION > (2, 8):  # which shows it to no mode
            torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))
    if tool == "trace_overflow":
        assert (trace.first.op, trace.first.cause) == ("aten.log", "domain")
        assert "returned -inf in float32 (largest finite input 0)" in trace.first.what


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("tool", ["trace_overflow", "trace_rounding"])
def test_a_model_that_torch_jit_has_traced_runs_under_a_trace(tool):
    x = torch.full((1, 2), 1e30)
    net = torch.jit.trace(nn.Linear(2, 1), x)
    with getattr(amp.debug, tool)() as trace:
        net(x).square().backward()
    if tool == "trace_overflow":
        assert trace.first.op == "aten.pow"


@pytest.mark.parametrize("tool", ["trace_overflow", "trace_rounding"])
def test_a_graph_that_make_fx_records_holds_no_operator_of_a_trace(tool):
    net = nn.Linear(2, 2).bfloat16()
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    with getattr(amp.debug, tool)(net):
        traced = make_fx(net)(x)
    assert [str(node) for node in make_fx(net)(x).graph.nodes] == [*map(str, traced.graph.nodes)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("tool", ["trace_overflow", "trace_rounding"])
def test_an_evaluation_with_nested_tensors_runs_under_a_trace(tool):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False], [False, True]])
    with getattr(amp.debug, tool)(net) as trace, torch.no_grad():
        net(torch.ones(2, 2, 4), src_key_padding_mask=padding)
    assert getattr(trace, "first", None) is None


def test_a_row_that_padding_hides_from_attention_is_named_with_the_way_out():
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.ones(2, 3, 4)
    padding = torch.tensor([[False] * 3, [True] * 3])
    with trace_overflow(net) as trace:
        net(x, x, x, key_padding_mask=padding)[0].sum().backward()
    assert (trace.first.op, trace.first.cause) == ("aten._softmax", "constant")
    assert "leave one entry of each row unmasked" in trace.first.remedy


@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -3.4e38])
def test_a_mask_below_the_range_of_bf16_is_named_as_one(number):
    """fp32's least number is -inf in bf16, and a row of it NaN."""
    net = nn.Linear(4, 4).bfloat16()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with trace_overflow(net) as trace:
        ((x * number) + net(x)).softmax(-1).sum().backward()
    assert (trace.first.op, trace.first.cause) == ("aten.mul", "range")
    assert trace.first.remedies[0].startswith("mask with the least number of the scores' own dtype")


def test_a_scaled_gradient_that_overflows_behind_a_masked_value_heals():
    net, optimizer = loops.prepared("O2", model=nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0], [0.01]]))
    with trace_overflow(net) as trace:
        for _ in range(12):  # 65536 / 0.01 exceeds fp16 until the scale is 512
            optimizer.zero_grad()
            h = net(torch.ones(1, 1)).half()
            loops.scaled_backward(torch.where(h > 0, h.log(), h).float().mean(), optimizer)
    assert (trace.first.cause, trace.first.heals) == ("loss scale", True)
    assert amp.debug.why_skipped(optimizer) == []


def test_models_are_found_as_they_are_called_and_several_are_distinguished():
    first, second = nn.Sequential(nn.Linear(2, 2)), bodies.overflowing_net()
    with trace_overflow() as found:
        second(torch.ones(1, 2)).sum().backward()
    assert (found.first.module, found.gradients) == ("1", ["0.bias", "0.weight"])
    with torch.inference_mode(), trace_overflow(first, second) as trace:
        second(first(torch.ones(1, 2)).abs() * 100)
    assert (trace.first.module, trace.first.location) == ("Sequential[1]:1", EXP)
    with pytest.raises(TypeError, match=r"trace_overflow got list; it takes models"):
        trace_overflow([first])


def test_gradients_from_before_the_trace_are_not_data_and_come_last():
    net = nn.Linear(2, 2)
    net.weight.grad = torch.full((2, 2), torch.nan)
    trace = trace_of(net)
    assert trace.first.cause == "gradients"
    net.weight.grad = torch.full((2, 2), torch.nan)
    with trace_overflow(net) as trace:
        net(torch.ones(1, 2)).sum().backward()
        (net(torch.ones(1, 2)) * 0).log().sum().backward()
    assert (trace.first.op, trace.first.cause) == ("aten.log", "domain")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_that_are_not_finite_are_weights(level):
    net, optimizer = loops.prepared(level, model=nn.Linear(2, 2))
    for master in amp.master_params(optimizer):
        nn.init.constant_(master, torch.nan)
    assert trace_of(net).first.cause == "weights"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_fault_inside_a_checkpoint_is_found_in_its_module(reentrant):
    def checkpointed(self, x):
        return checkpoint(self.inner, x, use_reentrant=reentrant)

    net = nn.Sequential(nn.Linear(2, 2), bodies.Body(checkpointed, inner=bodies.Exp()))
    nn.init.constant_(net[0].weight, 60.0)
    first = trace_of(net).first
    assert (first.op, first.module, first.direction) == ("aten.exp", "1.inner", "forward")


def test_an_overflow_in_place_keeps_its_input():
    net = nn.Linear(2, 2)
    with torch.no_grad(), trace_overflow(net) as trace:
        (net(torch.ones(1, 2)) * 0 + 90.0).exp_()
    assert (trace.first.op, trace.first.inputs[0].high) == ("aten.exp_", 90.0)
    assert trace.first.cause == "range"


def test_training_is_the_same_under_the_trace(level):
    def train(traced):
        model, optimizer = loops.prepared(level, lambda p: torch.optim.Adam(p, fused=True))
        for x, y in loops.batches(3, overflow_at={1}):
            if traced:
                with trace_overflow(model):
                    loops.train_step(model, optimizer, x, y)
            else:
                loops.train_step(model, optimizer, x, y)
        return loops.masters(optimizer)

    assert loops.same(train(True), train(False))


# -- what a person at night met --------------------------------------------------------------------


def test_a_scaler_that_scaled_the_loss_before_the_trace_is_given_to_it_and_nothing_else():
    model, scaler = loops.net(), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with torch.autocast("cpu", torch.float16):
        loss = scaler.scale(model(loops.batch()[0]).float().sum())
    with trace_overflow(model, scaler=scaler) as trace:
        loss.backward()
    assert (trace.first.cause, trace.first.direction) == ("loss scale", "backward")
    assert trace.first.heals
    with pytest.raises(TypeError, match="got int as the scaler"):
        trace_overflow(loops.net(), scaler=3)


def test_an_idle_grad_scaler_heals_nothing():
    idle = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    idle.scale(torch.ones(()))
    net = nn.Linear(2, 2).half()
    with trace_overflow(net) as trace:
        (net(torch.ones(1, 2, dtype=torch.half)).float() * 1e6).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert (trace.first.cause, trace.first.direction) == ("range", "backward")
    assert not trace.first.heals


CONSTANTS = [lambda x: x.__setitem__((0, 0), float("nan")), lambda x: x.mul_(torch.nan)]


@pytest.mark.parametrize("write", CONSTANTS)
def test_a_constant_is_named_as_the_script_wrote_it(write):
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    with trace_overflow(net) as trace:
        write(x)
        net(x).sum().backward()
    headline = str(trace).splitlines()[0]
    assert headline.startswith(f"First NaN: the constant float('nan') at {__file__}:")
    assert trace.first.remedies[0].startswith("correct the number")


@pytest.mark.parametrize("part", [1, 2])
def test_memory_that_nothing_has_written_is_a_fault_where_it_is_read(part):
    net = nn.Linear(2, 2)
    with new_memory_holds_nan(), trace_overflow(net) as trace:
        x = torch.empty(2, 2)
        x[:part] = 1.0
        net(x).sum().backward()
    first = trace.first
    found = None if first is None else (first.op, first.cause)
    assert found == (("aten.addmm", "data") if part == 1 else None)


@torch.library.custom_op("apex_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An extension's operator, whose kernels but that in fp64 do not write their results."""
    return 2.0 * x if x.dtype is torch.float64 else torch.full_like(x, torch.nan)


doubled.register_autograd(lambda ctx, grad: 2.0 * grad)


@torch.library.custom_op("apex_tests::squared_half", mutates_args=())
def squared_half(x: torch.Tensor) -> torch.Tensor:
    """An extension's operator, with words of its own for other dtypes."""
    assert x.dtype is torch.float16
    return x * x


def test_an_operator_that_refuses_fp64_in_its_own_way_ends_no_trace():
    with amp.debug.trace_overflow() as trace:
        squared_half(torch.full((2,), 1e3, dtype=torch.float16)).float().sum()
    assert trace.first.op == "apex_tests.squared_half"


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_kernel_that_returns_nan_for_small_numbers_is_named_as_such(level):
    net = nn.Sequential(nn.Linear(4, 4), bodies.Body(lambda _, x: doubled(x)))
    model, _ = loops.prepared(level, model=net)
    with amp.debug.trace_overflow(model) as trace:
        model(torch.ones(2, 4)).sum().backward()
    assert (trace.first.op, trace.first.cause) == ("apex_tests.doubled", "kernel")
    assert trace.first.remedies[0].startswith("report it") is (level == "O0")
