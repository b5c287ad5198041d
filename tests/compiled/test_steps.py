"""Training steps, and steps of optimizers, under ``torch.compile``: eager's results, few graphs."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from apex import amp
from tests.compiled import cases
from tests.support import loops
from tests.support.features import needs_masters

pytestmark = pytest.mark.filterwarnings(  # of torch's own making
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_compiled_step_trains_as_eager_and_skips_overflows(level):
    ours, reference = (loops.prepared(level, loops.OPTIMIZERS["SGD"]) for _ in range(2))
    step, _ = cases.compiled(lambda x, y: loops.train_step(*ours, x, y), fullgraph=False)
    # Static scales check nothing: an inf would go into the weights.
    for x, y in loops.batches(6, overflow_at={2, 4} if level == "O2" else ()):
        loss = step(x, y)
        cases.assert_close(loss, loops.train_step(*reference, x, y), level)
    (masters, scale), (expected, expected_scale) = (
        cases.training_state(optimizer) for _, optimizer in (ours, reference)
    )
    cases.assert_close(masters, expected, level)
    assert scale == expected_scale


@pytest.mark.parametrize("level", loops.MIXED)
def test_a_thread_trains_while_another_one_compiles(level):
    """torch then says in each thread that it compiles."""
    model, optimizer = loops.prepared(level, loss_scale="dynamic")
    reference, plain = loops.prepared(level, loss_scale="dynamic")
    expected = loops.train(reference, plain)
    losses = cases.while_compiling(lambda: loops.train(model, optimizer))
    assert loops.same((losses, loops.masters(optimizer)), (expected, loops.masters(plain)))


@needs_masters
@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_written_masters_and_plain_sums_are_exact_while_another_thread_compiles(level):
    def outputs_and_sum():
        model, optimizer = loops.prepared(level, model=loops.Weights("a"), loss_scale=1.0)
        (master,) = amp.master_params(optimizer)
        with torch.no_grad():
            master.mul_(0.5)
        outputs = [model(a=1.0) for _ in range(300)]
        for output in outputs:
            output.backward()
        return outputs[0].item(), master.grad[0].item()

    assert cases.while_compiling(outputs_and_sum) == (1.0, 300.0)


@cases.SAME_GRAPHS
def test_compiled_step_breaks_no_oftener_than_autocast_and_grad_scaler():
    model, optimizer = loops.plain_pair(loops.OPTIMIZERS["Adam"])
    scaler = torch.amp.GradScaler("cpu")

    def plain(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loops.loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def breaks(fn):
        torch._dynamo.reset()
        counters.clear()
        step, _ = cases.compiled(fn, backend="eager", fullgraph=False)
        for x, y in loops.batches(3):
            step(x, y)
        return cases.graph_breaks()

    plain_breaks = breaks(plain)
    ours = loops.prepared("O4", loops.OPTIMIZERS["Adam"], loss_scale="dynamic")
    assert breaks(lambda x, y: loops.train_step(*ours, x, y)) <= plain_breaks


@loops.every(kind=["block", "delayed", "plain"], level=loops.WITH_MASTERS)
def test_many_passes_add_up_in_fp32(level, kind):
    """In 16 bits, the sum would stand still at its first element."""
    large = 2.0 / torch.finfo(loops.LEVELS[level].compute).eps
    factors = torch.tensor([large, *[1.0] * 44])
    for _ in range(2):  # the second model runs code that was traced for the first
        model, optimizer = loops.prepared(level, model=loops.Weights(), loss_scale=1.0)
        run, _ = cases.compiled(model)
        for index, factor in enumerate(factors):
            loss = run(a=factor, b=factor)
            if kind == "plain":
                loss.backward()
            else:
                delays = kind == "delayed" and index < 44
                loops.scaled_backward(loss, optimizer, delay_unscale=delays)
        grads = [master.grad[0].item() for master in amp.master_params(optimizer)]
        assert grads == [large + 44.0] * 2


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_passes_that_a_compiled_function_runs_add_up_in_fp32(level):
    large = 2.0 / torch.finfo(loops.LEVELS[level].compute).eps
    model, optimizer = loops.prepared(level, model=loops.Weights("a"), loss_scale=1.0)

    def run(factors):
        for factor in factors:
            model(a=factor).backward()

    cases.compiled(run, fullgraph=False)[0](torch.tensor([large, *[1.0] * 44]))
    (master,) = amp.master_params(optimizer)
    assert master.grad[0].item() == large + 44.0


def test_accumulating_clipping_and_two_losses_compile():
    def step(model, optimizer, x, y):
        for loss_id in range(2):
            loops.scaled_backward(loops.loss_of(model, x, y), optimizer, loss_id=loss_id)
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        model.zero_grad()
        return norm

    adam = loops.OPTIMIZERS["Adam"]
    ours, reference = (loops.prepared("O2", adam, num_losses=2) for _ in range(2))
    run, _ = cases.compiled(step, fullgraph=False)
    for x, y in loops.batches(4, {1}):
        ours_norm, norm = run(*ours, x, y), step(*reference, x, y)
        if norm.isfinite():
            cases.assert_close(ours_norm, norm, "O2")
    cases.assert_close(loops.masters(ours[1]), loops.masters(reference[1]), "O2")


def _update(p, grad):
    p.copy_(p.float() - 0.1 * grad.float())


class CompilesItsStep(torch.optim.Optimizer):
    """Compiles what it does to each parameter, as torchao's optimizers do."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                torch.compile(_update, fullgraph=True, backend="eager")(p.detach(), p.grad)


def test_an_optimizer_that_compiles_its_own_step():
    model, optimizer = loops.prepared("O5", CompilesItsStep)
    plain = loops.prepared("O5", lambda params: torch.optim.SGD(params, lr=0.1))
    for x, y in loops.batches(3):
        loops.train_step(model, optimizer, x, y)
        loops.train_step(*plain, x, y)
    cases.assert_close(list(amp.master_params(optimizer)), list(amp.master_params(plain[1])), "O5")
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))


# -- the optimizer's own step is compiled, amp's part is not --------------------------------------

ADAMW = {
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "capturable Adam": lambda params: torch.optim.Adam(params, lr=1e-2, capturable=True),
}
CASES = [
    *[(level, name) for level in ("O1", "O2", "O4", "O5") for name in ("SGD", "Adam")],
    *[("O2", name) for name in ("fused AdamW", "fused SGD", "foreach AdamW", "LBFGS closure")],
]


def optimize(level, name):
    loss_scale = 64.0 if name == "LBFGS closure" else "dynamic"
    return loops.prepared(level, {**loops.OPTIMIZERS, **ADAMW}[name], loss_scale=loss_scale)


def take(model, optimizer, step, x, y):
    def closure():
        optimizer.zero_grad()
        return loops.backward(model, optimizer, x, y)

    if isinstance(optimizer, torch.optim.LBFGS):
        step(closure)
    else:
        closure()
        step()


@pytest.mark.parametrize(("level", "name"), CASES)
def test_compiled_step_equals_eager_and_skips_overflows(level, name):
    (model, optimizer), (reference, plain) = optimize(level, name), optimize(level, name)
    step, _ = cases.compiled(optimizer.step, backend="eager", fullgraph=False)
    overflows = () if name == "LBFGS closure" else {1, 4}
    for x, y in loops.batches(6, overflows):
        take(model, optimizer, step, x, y)
        take(reference, plain, plain.step, x, y)
        pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
        assert all(loops.same(param.data, master.data.to(param.dtype)) for param, master in pairs)
    if name in ("fused AdamW", "fused SGD") or (name == "SGD" and cases.SAME_BITS):
        assert loops.same(cases.training_state(optimizer), cases.training_state(plain))
    cases.assert_close(cases.training_state(optimizer)[0], cases.training_state(plain)[0], "O0")
    assert cases.training_state(optimizer)[1] == 2.0**14 or not overflows


@pytest.mark.gpu(kernels="inductor writes and compiles them")
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_compiled_capturable_step_equals_eager_on_a_gpu(level):
    def parts():
        model = loops.net().cuda()
        return loops.prepared(level, ADAMW["capturable Adam"], model, loss_scale="dynamic")

    (model, optimizer), (reference, plain) = parts(), parts()
    step, _ = cases.compiled(optimizer.step, backend="inductor", fullgraph=False)
    for x, y in loops.batches(5, {1}):
        take(model, optimizer, step, x.cuda(), y.cuda())
        take(reference, plain, plain.step, x.cuda(), y.cuda())
    cases.assert_close(cases.training_state(optimizer)[0], cases.training_state(plain)[0], "O0", 64)


@cases.SAME_GRAPHS
@pytest.mark.parametrize("optimizer_name", ["SGD", "fused AdamW"])
def test_compiled_step_makes_the_graphs_of_forward_and_own_step_alone(optimizer_name):
    model, optimizer = loops.prepared("O2", loops.OPTIMIZERS[optimizer_name])
    train_step = functools.partial(loops.train_step, model, optimizer)
    step, graphs = cases.compiled(train_step, backend="eager", fullgraph=False)
    for x, y in loops.batches(5):
        step(x, y)
    # torch's SGD compiles again when its momentum is there; fused steps are kernels already.
    assert graphs.frame_count == {"SGD": 3, "fused AdamW": 1}[optimizer_name]
