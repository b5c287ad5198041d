"""``torch.compile(model, fullgraph=True)`` after initialize: the dtypes and gradients of eager."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules

from apex import amp
from tests.compiled import cases
from tests.support import loops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of inductor


def backward(model, optimizer, loss):
    loops.scaled_backward(loss, optimizer)
    gradients = loops.grads(amp.master_params(optimizer))
    optimizer.zero_grad()
    return gradients


def test_compiled_model_and_loss_give_dtypes_values_and_gradients_of_eager(level):
    model, optimizer = loops.prepared(level, model=cases.BoundaryNet(), loss_scale=16.0)
    x, y = torch.randn(3, 2, 3), torch.randint(2, (3,))
    loss, outputs = cases.loss_fn(model, x, y)
    gradients = backward(model, optimizer, loss)
    run, graphs = cases.compiled(cases.loss_fn)
    compiled_loss, compiled_outputs = run(model, x, y)
    assert cases.dtypes(compiled_outputs) == cases.dtypes(outputs)
    cases.assert_close(compiled_outputs, outputs, level)
    cases.assert_close(compiled_loss, loss, level)
    cases.assert_close(backward(model, optimizer, compiled_loss), gradients, level)
    assert (graphs.frame_count, cases.graph_breaks()) == (1, 0)


def test_nothing_is_compiled_after_the_second_iteration(level):
    model, optimizer = loops.prepared(level)
    run, graphs = cases.compiled(model)
    batches = [(torch.randn(size, 4), torch.randn(size, 2)) for size in (3, 5, 4, 7, 3)]
    loops.train(run, optimizer, data=batches[:2])  # torch makes the size dynamic at the second
    with cases.no_recompilation():
        loops.train(run, optimizer, data=batches[2:])
    assert graphs.frame_count == 2


def test_a_class_of_models_uses_up_the_recompile_limit_of_no_other(level):
    with torch._dynamo.config.patch(cache_size_limit=1):
        for model in (loops.net(), nn.Linear(4, 2), loops.Net()):
            run, graphs = cases.compiled(loops.prepared(level, model=model)[0])
            run(torch.randn(3, 4))
            assert graphs.frame_count == 1


@pytest.mark.parametrize("compile_model", ["torch.compile first", "model.compile first", "after"])
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_model_may_be_compiled_before_or_after_initialize(level, compile_model):
    inner = model = loops.net()
    if compile_model == "torch.compile first":
        model, graphs = cases.compiled(model)
    if compile_model == "model.compile first":
        model.compile(backend="aot_eager", fullgraph=True)
    model, optimizer = loops.prepared(level, model=model)
    if compile_model == "after":
        model, graphs = cases.compiled(model)
    reference = loops.prepared(level)
    for batch in [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(3)]:
        expected = loops.train_step(*reference, *batch)
        assert loops.same(loops.train_step(model, optimizer, *batch), expected)
    assert loops.same(inner(batch[0]), model(batch[0]))
    if compile_model != "model.compile first":
        assert graphs.frame_count == 1


def center(self, x):
    """Keeps a running average of its inputs."""
    self.mean.lerp_(x.detach().mean(0), 0.25)
    return self.linear(x - self.mean)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_compiled_part_that_writes_a_buffer_in_16_bits_compiles_whole(level):
    """In the third pass, amp watches such buffers by the operators that code calls."""
    plain = loops.Body(center, linear=nn.Linear(4, 2), mean=nn.Buffer(torch.zeros(4)))
    part, graphs = cases.compiled(copy.deepcopy(plain))
    ours, reference = (
        loops.prepared(level, model=nn.Sequential(module), loss_scale=1.0)
        for module in (part, plain)
    )
    assert loops.same(loops.train(*ours, 5), loops.train(*reference, 5))
    assert cases.graph_breaks() == 0 < graphs.frame_count


def summed_by(model):
    return lambda x: model(x).sum(1)


@loops.every(calls=[False, True], of=["torch.compile", "model.compile", "model and loss"])
@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_masters_that_a_script_writes_reach_compiled_code(level, of, calls):
    """As SAM and Lookahead write them; also with apex's own call."""
    for _ in range(2):  # the second model runs code that was traced for the first
        model, optimizer = loops.prepared(level)
        run = model
        if of == "model.compile":
            model.compile(backend="aot_eager", fullgraph=True)
        else:
            run, _ = cases.compiled(model if of == "torch.compile" else summed_by(model))
        x = torch.randn(3, 4)
        before = run(x)
        for param in amp.master_params(optimizer):
            param.data.mul_(0.5)
        if calls:
            optimizer._master_params_to_model_params()
        assert not torch.equal(run(x), before)
        assert loops.agree(model, optimizer)


class WithMethod(nn.Linear):
    """A script calls its method, and not the model."""

    def project(self, x):
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


@loops.every(level=loops.WITH_MASTERS, exports=[False, True])
def test_masters_that_a_script_writes_reach_the_method_that_other_code_calls(level, exports):
    model, optimizer = loops.prepared(level, model=WithMethod(4, 4))
    x = torch.randn(3, 4)
    whole = loops.Body(lambda self, x: self.part.project(x), part=model)
    project, _ = cases.compiled(whole)
    project(x)
    for param in amp.master_params(optimizer):
        param.data.mul_(0.5)
    if exports:
        project = torch.export.export(whole, (x,)).module()
    projected = project(x)
    assert loops.same(projected, model.project(x))


class CallsItself(nn.Linear):
    """Calls its own methods and reads its own class."""

    factor = 2.0

    def forward(self, x):
        count = len(list(self.parameters()))
        return {"y": next(self.halves(x)) * count * self.__class__.factor}

    def halves(self, x):
        yield super().forward(x).chunk(2)[0]

    def encode(self, x):
        return {"y": self.forward(x)["y"].float()}


CALLS = {
    "model": lambda model: model,
    "model.forward": lambda model: lambda x: model.forward(2 * x),
    "model.encode": lambda model: lambda x: model.encode(2 * x),
    "a method": lambda model: model.encode,
}


@cases.GENERATORS
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_methods_of_a_model_compile_as_they_run_in_eager(level, call):
    model, _ = loops.prepared(level, model=CallsItself(4, 2))
    model.register_forward_pre_hook(lambda module, args: args[0] * 2)
    x = torch.randn(4, 4)
    expected = call(model)(x)
    run, _ = cases.compiled(call(model))
    output = run(x)
    assert cases.dtypes(output) == cases.dtypes(expected)
    cases.assert_close(output, expected, level)
    with cases.no_recompilation():
        run(x)


def nested(self, batch, *, scale):
    """Takes and gives nested containers."""
    (x, mask), extra = batch["pair"], batch["extra"]
    return {"y": [self.linear(x) * mask * scale], "extra": extra}


@torch.no_grad()  # where dynamo reads no gradients of what follows the graph break
@pytest.mark.parametrize("level", cases.MIXED)
def test_nested_inputs_and_outputs_are_cast_as_in_eager(level):
    model, _ = loops.prepared(level, model=loops.Body(nested, linear=nn.Linear(2, 2)))
    batch = {"pair": (torch.randn(3, 2), torch.ones(3, 2)), "extra": torch.arange(3)}
    theirs = model(batch, scale=2.0)
    for fullgraph in (True, False):  # the second time with a graph break inside
        ours = cases.compiled(model, fullgraph=fullgraph)[0](batch, scale=2.0)
        assert ours["y"][0].dtype is theirs["y"][0].dtype
        assert ours["extra"].dtype is torch.int64
        cases.assert_close(ours, theirs, level)
        model.linear.register_forward_hook(lambda *_: torch._dynamo.graph_break())


def partly_off(self, x):
    """Leaves the casts for a part, and enters a prepared model there."""
    before = self.linear(x)
    with amp.disable_casts():
        inside = self.linear(x)
        inner = self.inner[0](x)
    return before, inside, inner, self.linear(x)


class CompiledForward(nn.Module):
    """A class whose forward a script has compiled."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def forward(self, x):
        return self.linear(x)


def test_compiled_code_calls_a_model_whose_class_compiles_its_forward(level):
    model, _ = loops.prepared(level, model=CompiledForward())
    x = torch.ones(2, 4)
    expected = model(x)
    found = torch.compile(lambda: model(x), backend="eager")()
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@cases.GENERATORS
@pytest.mark.parametrize("level", cases.MIXED)
def test_disable_casts_traces(level):
    inner, _optimizer = loops.prepared(level)
    model = loops.Body(partly_off, linear=nn.Linear(4, 4), inner=[inner])
    model = amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(3, 4)
    run, graphs = cases.compiled(model)
    assert [y.dtype for y in run(x)] == [y.dtype for y in model(x)]
    assert graphs.frame_count == 1


def softmax(x):
    return torch.softmax(x, 0)


def test_compiled_code_follows_a_changed_op_table():
    x = torch.ones(2, dtype=torch.bfloat16)
    run, _ = cases.compiled(softmax)
    _first, _ = loops.prepared("O4")
    assert run(x).dtype is torch.float32
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    try:
        _second, _ = loops.prepared("O4")
    finally:
        amp.lists.functional_overrides.FP32_FUNCS.append("softmax")
    assert run(x).dtype is softmax(x).dtype


@torch.compiler.assume_constant_result  # dynamo calls it at tracing
def collect():
    gc.collect()
    return 1


def prepared_until_a_collection(level):
    model, _ = loops.prepared(level)
    model.cycle = [model]


@pytest.fixture
def collects_when_told():
    gc.disable()
    yield
    gc.enable()


def collecting_backend(graph, example_inputs):
    gc.collect()
    return graph


def test_a_session_that_ends_while_dynamo_traces_leaves_no_casts():
    prepared_until_a_collection("O1")
    torch.compile(torch.sin, backend=collecting_backend)(torch.ones(2))
    with amp.disable_casts():
        pass
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("ends", ["at first", "before", "after"])
@pytest.mark.parametrize(("ended", "level"), [("O4", "O0"), ("O4", "O2"), ("O1", "O5")])
@pytest.mark.usefixtures("collects_when_told")
def test_a_session_that_ends_while_dynamo_traces_changes_no_other_model(
    monkeypatch, ended, level, ends
):
    """It ends before a trace begins, before the forward is traced, or before guards are made."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    prepared_until_a_collection(ended)
    model, _ = loops.prepared(level, model=plain)
    factor = collect if ends == "before" else int
    backend = "aot_eager" if ends == "before" else collecting_backend
    run = torch.compile(lambda x: torch.softmax(model(x * (1.0 + factor())), 1), backend=backend)
    x = torch.randn(3, 4)
    if ends == "at first":
        check = trace_rules.check

        def collect_first(*args, **kwargs):
            gc.collect()
            return check(*args, **kwargs)

        monkeypatch.setattr(trace_rules, "check", collect_first)
    output = run(x)
    assert loops.same(output, torch.softmax(model(x * (1.0 + factor())), 1))
