"""Backward passes: mixed dtypes in user code are resolved, all else stays as it is."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from apex import amp
from tests.support import loops

level = loops.at_levels("O1", "O4")
BF16, FP32 = torch.bfloat16, torch.float32


def in_pass(rule, *, hook, start=torch.Tensor.backward, block=True, device="cpu"):
    """Returns what ``rule`` gives for a bf16 gradient in a pass, in a block or outside."""
    model, optimizer = loops.prepared("O4", model=nn.Linear(2, 2).to(device))
    results = []

    def note(grad):
        results.append(rule(grad))
        return grad

    out = model(torch.ones(2, 2, device=device))
    if hook:
        out.register_hook(note)
    loss = (out if hook else loops.InBackward.apply(out, note)).sum()
    with amp.scale_loss(loss, optimizer) if block else contextlib.nullcontext(loss) as scaled_loss:
        start(scaled_loss)
    one = torch.ones(1, 1, device=device)
    assert torch.mm(one, one).dtype is BF16  # on again
    return results


hook = loops.each_of(True, False, ids=["hook", "function"])
block = loops.each_of(True, False, ids=["scale_loss", "backward"])


def test_a_script_s_own_block_in_a_pass_casts_by_the_rows(hook, block):
    def rule(grad):
        with torch.autocast("cpu", BF16):
            return grad.exp().dtype, torch.mm(grad.float(), grad.float()).dtype

    assert in_pass(rule, hook=hook, block=block) == [(FP32, BF16)]


MIXED = {
    "@": (lambda g, w: g @ w, BF16),
    "right @": (lambda g, w: w @ g, BF16),
    "einsum": (lambda g, w: torch.einsum("ij,jk", g, w), BF16),
    "addmv": (lambda g, w: torch.addmv(w[0], g, w[0]), BF16),
    "addmm_": (lambda g, w: g.clone().addmm_(w, g), BF16),
    "addmm_ into fp32": (lambda g, w: w.clone().addmm_(g, g.float()), FP32),
    "dot": (lambda g, w: torch.dot(g[0], w[0]), FP32),
    "linear": (nn.functional.linear, BF16),
    "mse_loss": (nn.functional.mse_loss, FP32),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_python_code_in_a_pass_may_mix_dtypes(hook, block, device):
    weight = torch.rand(2, 2, device=device)
    for name, (rule, wanted) in MIXED.items():
        results = []

        def compared(grad, rule=rule, results=results):
            with amp.disable_casts():
                results.append(rule(grad.float(), weight))
            return rule(grad, weight)

        (found,) = in_pass(compared, hook=hook, block=block, device=device)
        assert found.dtype is wanted, name
        torch.testing.assert_close(found.float(), results[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rule", [lambda g: g.exp(), lambda g: g @ g, lambda g: g.clone().exp_()])
def test_python_code_in_a_pass_keeps_one_dtype(hook, block, rule):
    plain = rule(torch.ones(2, 2, dtype=BF16))
    (got,) = in_pass(rule, hook=hook, block=block)
    assert got.dtype is plain.dtype
    assert torch.equal(got, plain)


def test_torch_s_own_kernels_cast_nothing_in_a_block(hook):
    (got,) = in_pass(torch.prod, hook=hook)
    assert got.dtype is BF16


@pytest.mark.parametrize("own_pass", [True, False], ids=["backward", "grad"])
def test_a_recompute_by_a_function_of_the_script_is_the_forward_again(level, block, own_pass):
    model, optimizer = loops.prepared(level, model=nn.Linear(4, 4), loss_scale=1.0)
    x, dtypes, found = torch.randn(2, 4), [], []

    def attend(x):
        scores = nn.functional.linear(x, model.weight, model.bias)
        weights = (scores @ scores.t()).softmax(-1)
        dtypes.append((scores.dtype, weights.dtype))
        return weights @ scores

    for run in (attend, lambda x: loops.Recomputed.apply(attend, own_pass, x, *model.parameters())):
        given = x.clone().requires_grad_()
        loss = run(given).float().pow(2).sum()
        optimizer.zero_grad()
        loops.scaled_backward(loss, optimizer) if block else loss.backward()
        found.append([given.grad, *(param.grad for param in model.parameters())])
    low = torch.float16 if level == "O1" else BF16
    assert dtypes == [(low, FP32)] * 3
    assert loops.same(*found)


SHOWN = pytest.mark.skipif(
    "handle_torch_function" not in torch.autograd.backward.__code__.co_names,
    reason="this torch shows it to no mode",
)
STARTS = [
    pytest.param(lambda loss: loss.backward(torch.ones_like(loss)), id="gradient"),
    pytest.param(lambda loss: torch.autograd.backward([loss]), id="autograd.backward", marks=SHOWN),
    pytest.param(lambda loss: (loss.backward(retain_graph=True), loss.backward()), id="twice"),
]


@pytest.mark.parametrize("start", STARTS)
def test_casts_are_off_in_the_formulas_of_a_pass(start):
    found = in_pass(lambda grad: torch.is_autocast_enabled("cpu"), hook=True, start=start)
    assert set(found) == {False}


def test_casts_are_off_in_autograd_grad_in_a_block():
    model, optimizer = loops.prepared("O4", model=nn.Linear(2, 2))
    found, out = [], model(torch.ones(2, 2))
    out.register_hook(lambda grad: found.append(torch.is_autocast_enabled("cpu")))
    with amp.scale_loss(out.sum(), optimizer) as scaled_loss:
        torch.autograd.grad(scaled_loss, model.weight)
    assert found == [False]


def test_a_pass_that_torch_refuses_is_refused_alike():
    _, optimizer = loops.prepared("O4")
    with amp.scale_loss(torch.ones(()), optimizer):
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            torch.ones(2, requires_grad=True).exp().backward()
        x = torch.ones((), requires_grad=True)
        with pytest.raises(RuntimeError, match="got 2 tensors and 1 gradients"):
            torch.autograd.grad([x.exp(), x.log()], x, torch.ones(()))


def test_a_pass_with_casts_disabled_is_left_alone():
    def norm(grad):
        return nn.functional.layer_norm(grad, [2], torch.ones(2)).dtype

    def disabled(loss):
        with amp.disable_casts():
            loss.backward()

    assert in_pass(norm, hook=True, start=disabled) == [BF16]


def attention(*inputs):
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        return nn.functional.scaled_dot_product_attention(*inputs)


FP32_PARTS = {
    "linear": lambda x: nn.functional.linear(x, x),
    "bilinear": lambda x: nn.functional.bilinear(x, x, x.reshape(1, 3, 3)),
    "products": lambda x: (x @ x).mv(x[0]) + torch.linalg.multi_dot([x, x, x[0]]),
    "batched": lambda x: torch.einsum("bij,bjk->bik", x[None], x[None]).baddbmm(x[None], x[None]),
    "convolution": lambda x: nn.functional.conv1d(x[None], x[:, :, None]),
    "attention": lambda x: attention(x[None], x[None], x[None]),
    "linear algebra": lambda x: torch.linalg.solve(x, x[0]) + torch.linalg.svdvals(x) + x.det(),
}


def product_in_pass(model, optimizer, found):
    """Adds the dtype of a product of mixed dtypes in a pass of a block."""
    out = model(torch.ones(2, 2))
    out.register_hook(lambda grad: found.append((grad @ torch.ones(2, 2)).dtype))
    loops.scaled_backward(out.float().sum(), optimizer)


def test_a_block_mixes_dtypes_by_the_casts_of_its_own_session_in_any_thread():
    made = {level: loops.prepared(level, model=nn.Linear(2, 2)) for level in ("O1", "O4")}
    for level, low in (("O1", torch.float16), ("O4", BF16)):
        found = []
        product_in_pass(*made[level], found)
        loops.in_a_thread(lambda pair=made[level], found=found: product_in_pass(*pair, found))
        assert found == [low, low]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_a_recompute_in_a_pass_has_the_dtypes_of_the_forward(reentrant):
    first, optimizer = loops.prepared("O4", model=nn.Linear(2, 2))
    second, _ = loops.prepared("O1", model=nn.Linear(2, 2))  # newer, so its casts are those around
    dtypes = []

    def block(x):
        with torch.autocast("cpu", enabled=False):  # mixes dtypes, with casts off
            norm = nn.functional.layer_norm(x.bfloat16(), [2], torch.ones(2))
        y = first(x) + norm
        dtypes.append((y.dtype, norm.dtype, second(x + 0).dtype))
        return y

    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = checkpoint(block, x, use_reentrant=reentrant)
        loops.scaled_backward(out.float().sum(), optimizer)
    assert dtypes == [(BF16, BF16, torch.float16)] * 2


@pytest.mark.parametrize("part", FP32_PARTS)
def test_gradients_and_forces_of_a_part_in_fp32_are_those_of_fp32(level, block, part):
    """Forces are ``torch.autograd.grad(create_graph=True)``: formulas with gradients enabled."""
    rule = FP32_PARTS[part]
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def forces():
        return torch.autograd.grad(rule(x).pow(2).sum(), x, create_graph=True)[0]

    (gradient,) = torch.autograd.grad(rule(x).pow(2).sum(), x)
    expected = forces()
    (expected_second,) = torch.autograd.grad(expected.pow(2).sum(), x)
    _, optimizer = loops.prepared(level, loss_scale=1.0)
    with amp.disable_casts():
        energy = rule(x).pow(2).sum()
    manager = amp.scale_loss(energy, optimizer) if block else contextlib.nullcontext(energy)
    with manager as scaled_energy:
        (found,) = torch.autograd.grad(scaled_energy, x, create_graph=True)
        scaled_energy.backward(retain_graph=True)
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, gradient)
    x.grad = None
    loops.scaled_backward(found.pow(2).sum(), optimizer)
    assert torch.equal(x.grad, expected_second)


def slicing():
    """A batch norm of some channels alone: torch's formula mixes dtypes, and fails under casts."""
    parts = {"first": nn.Conv2d(3, 8, 1), "norm": nn.BatchNorm2d(4), "last": nn.Conv2d(4, 4, 1)}
    return loops.Body(lambda self, x: self.last(self.norm(self.first(x)[:, :4])), **parts)


def test_a_dispatch_mode_of_the_script_changes_no_gradient(level):
    x = torch.randn(4, 3, 2, 2)
    grads = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        torch.manual_seed(0)
        model, optimizer = loops.prepared(level, model=slicing(), loss_scale=8.0)
        with mode:
            loops.scaled_backward(model(x).float().square().mean(), optimizer)
        grads.append([param.grad for param in model.parameters()])
    assert loops.same(*grads)


def test_a_pass_leaves_the_function_modes_of_the_script_as_they_are(level):
    model, optimizer = loops.prepared(level)
    data = list(loops.batches(2))
    torch.set_default_device("meta")
    try:
        loops.train(model, optimizer, data=data)
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.empty(0).device.type == "cpu"
    assert not torch.overrides._get_current_function_mode_stack()
