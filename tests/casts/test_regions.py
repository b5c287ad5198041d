"""Cast regions: where casts are on, in which thread, and what is left when they end."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_early_stop,
)

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.ambient import settle
from apex._engine.autocast.pass_casts import PassCasts
from apex._engine.autocast.region import (
    CastRegion,
    UncastRegion,
    active_dtype,
    casts_off,
)
from apex._torch.dispatcher import weight_cache_is_safe

BF16 = CastSpec(torch.bfloat16, ("cpu",), OpTable.default())
FP16 = CastSpec(torch.float16, ("cpu",), OpTable.default())


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    settle()
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def region():
    region = CastRegion(BF16)
    yield region
    region.leave_ambient()


def seen(x: torch.Tensor | None = None) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes that a matmul (torch's row) and exp of bf16 (a filled row) give here."""
    x = torch.ones(2, 2) if x is None else x
    return (x @ x).dtype, torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype


ON = (torch.bfloat16, torch.float32)
OFF = (torch.float32, torch.bfloat16)
NATIVE = (torch.bfloat16, torch.bfloat16)


def in_thread(fn):
    result = []
    thread = threading.Thread(target=lambda: result.append(fn()))
    thread.start()
    thread.join()
    return result[0]


def state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


# -- run ------------------------------------------------------------------------------------------


def test_run_casts_inside_and_not_outside(region):
    assert seen() == OFF
    assert region.run(seen) == ON
    assert seen() == OFF


def test_run_casts_in_any_thread(region):
    assert in_thread(lambda: region.run(seen)) == ON


def test_run_leaves_no_trace_after_an_exception(region):
    before = state()

    def fail():
        raise KeyError("inside")

    with pytest.raises(KeyError):
        region.run(fail)
    assert state() == before
    assert active_dtype() is None
    assert region.run(seen) == ON


def test_inner_region_rules_inside_and_the_outer_one_after_it(region):
    half = CastRegion(FP16)

    def outer():
        inside = half.run(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return inside, active_dtype(), seen()

    assert region.run(outer) == (torch.float16, torch.bfloat16, ON)


def test_users_autocast_off_inside_a_run_is_respected(region):
    def off():
        with torch.autocast("cpu", enabled=False):
            return seen()

    assert region.run(off) == OFF


def test_device_type_without_autocast_is_refused():
    with pytest.raises(ValueError, match=r"meta.*cpu, cuda, xpu, mps.*O2"):
        CastRegion(CastSpec(torch.float16, ("meta",), OpTable.default()))


# -- ambient --------------------------------------------------------------------------------------


def test_ambient_casts_until_left(region):
    before = state()
    region.enter_ambient()
    assert seen() == ON
    assert active_dtype() is torch.bfloat16
    region.leave_ambient()
    assert seen() == OFF
    assert state() == before
    region.leave_ambient()
    assert state() == before


def test_ambient_does_not_reach_other_threads(region):
    region.enter_ambient()
    assert in_thread(seen) == OFF
    assert in_thread(active_dtype) is None


@pytest.mark.parametrize("first_left", ["older", "newer"])
def test_newest_living_ambient_region_rules(first_left):
    before = state()
    older, newer = CastRegion(BF16), CastRegion(FP16)
    older.enter_ambient()
    newer.enter_ambient()
    assert active_dtype() is torch.float16
    (older if first_left == "older" else newer).leave_ambient()
    assert active_dtype() is (torch.float16 if first_left == "older" else torch.bfloat16)
    (newer if first_left == "older" else older).leave_ambient()
    assert active_dtype() is None
    assert state() == before


def test_state_of_the_user_comes_back_after_ambient(region):
    with torch.autocast("cpu", torch.float16):
        before = state()
        region.enter_ambient()
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        region.leave_ambient()
        assert state() == before


def test_ambient_that_began_in_an_autocast_block_ends_with_it(region):
    before = state()
    with torch.autocast("cpu", torch.float16):
        region.enter_ambient()
        assert seen() == ON
    assert region.run(seen) == ON
    assert seen() == OFF
    region.leave_ambient()
    assert state() == before


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_ambient_that_began_in_a_block_of_another_device_ends(region):
    before = state()
    with torch.autocast("cuda", torch.bfloat16):
        region.enter_ambient()
    assert region.run(seen) == seen() == ON
    region.leave_ambient()
    assert state() == before


def test_ambient_that_ends_in_an_autocast_block_is_off_after_it(region):
    before = state()
    region.enter_ambient()
    with torch.autocast("cpu", torch.bfloat16):
        region.leave_ambient()
        assert seen() == ON
    settle()  # an amp call
    assert seen() == OFF
    assert state() == before


def test_inner_ambient_of_a_block_leaves_the_outer_one(region):
    half = CastRegion(FP16)
    before = state()
    half.enter_ambient()
    with torch.autocast("cpu", enabled=False):
        region.enter_ambient()
        assert seen() == ON
    region.leave_ambient()
    assert active_dtype() is torch.float16
    assert seen() == (torch.float16, torch.float32)
    half.leave_ambient()
    assert state() == before


def test_ambient_ends_with_its_region(region):
    other = CastRegion(FP16)
    other.enter_ambient()
    del other
    gc.collect()
    assert seen() == OFF
    assert active_dtype() is None


@pytest.mark.parametrize("ends", ["left", "region gone"])
@pytest.mark.parametrize("op", ["forward", "amp call"])
def test_ambient_ended_in_another_thread_is_off_at_the_next_forward_or_call(ends, op):
    holder = [CastRegion(BF16)]
    before = state()
    holder[0].enter_ambient()
    in_thread(holder[0].leave_ambient if ends == "left" else lambda: (holder.clear(), gc.collect()))
    if op == "forward":
        assert CastRegion(FP16).run(lambda: torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
    else:
        settle()
    assert state() == before
    assert seen() == OFF
    holder.clear()
    gc.collect()
    assert torch.compiler.config.cache_key_tag == ""


def test_ambient_left_inside_its_own_run_ends_after_it(region):
    before = state()
    region.enter_ambient()

    def leave():
        region.leave_ambient()
        return seen()

    assert region.run(leave) == ON
    settle()
    assert state() == before


# -- off ------------------------------------------------------------------------------------------


def test_no_casts_turns_casts_off_and_back_on(region):
    region.enter_ambient()
    with casts_off():
        assert seen() == OFF
        assert active_dtype() is None
        with casts_off():
            assert seen() == OFF
        assert seen() == OFF
    assert seen() == ON


@pytest.mark.parametrize("ambient", [True, False])
def test_regions_stay_off_inside_no_casts(region, ambient):
    if ambient:
        region.enter_ambient()
    with casts_off():
        assert region.run(seen) == OFF
    assert region.run(seen) == ON


def test_uncast_region_is_off_inside_and_a_cast_region_in_it_on(region):
    region.enter_ambient()
    assert UncastRegion().run(seen) == OFF
    assert UncastRegion().run(lambda: (region.run(seen), seen())) == (ON, OFF)
    assert seen() == ON


# -- the user's own torch.autocast ----------------------------------------------------------------


def test_users_autocast_follows_the_table_while_a_region_lives(region):
    def users():
        with torch.autocast("cpu", torch.bfloat16):
            return seen(), active_dtype()

    assert in_thread(users) == (ON, torch.bfloat16)
    region.enter_ambient()
    assert users() == (ON, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):  # another dtype: torch's own
        assert seen() == (torch.float16, torch.bfloat16)


# -- kernels and copies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copy_is_a_region_of_its_own(copied):
    first = CastRegion(BF16)
    second = copied(first)
    del first
    gc.collect()
    assert second.run(seen) == ON
    assert second.spec == BF16


def test_regions_end_in_any_thread():
    holder = [CastRegion(BF16)]
    in_thread(holder.clear)
    CastRegion(BF16)
    assert torch.compiler.config.cache_key_tag == ""


def test_cache_tag_differs_by_table_and_comes_back():
    config = torch.compiler.config
    config.cache_key_tag = "mine"
    try:
        region = CastRegion(BF16)
        default = config.cache_key_tag
        other = CastRegion(CastSpec(torch.bfloat16, ("cpu",), BF16.table.without("torch", "exp")))
        assert len({"mine", default, config.cache_key_tag}) == 3
        del region, other
        gc.collect()
        assert config.cache_key_tag == "mine"
    finally:
        config.cache_key_tag = ""


# -- weights --------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts casts to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.count += 1
        return func(*args, **kwargs)


CACHES = pytest.mark.skipif(
    not weight_cache_is_safe, reason="this torch's weight cache loses gradients: it stays off"
)


@CACHES
@pytest.mark.parametrize("ambient", [True, False])
def test_weight_used_twice_in_a_run_is_cast_once(region, ambient):
    if ambient:
        region.enter_ambient()
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2, dtype=torch.bfloat16)
    with Casts() as casts:
        region.run(lambda: layer(layer(x)))
    assert casts.count == 1


@pytest.mark.parametrize("ambient", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.fill_(3.0),
        lambda p: p.detach().fill_(3.0),
        lambda p: p.data.copy_(torch.full_like(p, 3.0)),
    ],
)
def test_weight_changed_between_two_runs_is_seen(region, ambient, change):
    if ambient:
        region.enter_ambient()
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    region.run(layer, x)
    change(layer.weight)
    assert region.run(layer, x).item() == 6.0


def test_weight_first_used_without_grad_gets_its_gradient(region):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)

    def both():
        with torch.no_grad():
            layer(x)
        return layer(x)

    region.run(both).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))


@CACHES
def test_no_weight_cache_is_left_on(region):
    region.enter_ambient()
    assert not torch.is_autocast_cache_enabled()
    assert region.run(torch.is_autocast_cache_enabled)
    assert not torch.is_autocast_cache_enabled()


# -- backward -------------------------------------------------------------------------------------


def test_gradients_are_those_of_explicit_casts(region):
    torch.manual_seed(0)
    x, w, scale = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    explicit = w.detach().clone().requires_grad_()

    def fn(w):
        return (torch.layer_norm(torch.softmax(x @ w, 1).exp(), [4]).pow(2) * scale).sum()

    def by_hand(w):
        h = (x.bfloat16() @ w.bfloat16()).float()
        return (torch.layer_norm(torch.softmax(h, 1).exp(), [4]).pow(2) * scale).sum()

    loss = region.run(fn, w)
    with casts_off():
        loss.backward()
    by_hand(explicit).backward()
    torch.testing.assert_close(w.grad, explicit.grad)


@pytest.mark.parametrize("ambient", [True, False], ids=["ambient", "run-only"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_checkpoint_recomputes_in_the_dtypes_of_the_forward(region, ambient, reentrant, where):
    layer, dtypes = nn.Linear(2, 2), []

    def block(x):
        y = torch.exp(layer(x))
        z = nn.functional.layer_norm(layer(y), [2])
        dtypes.append((layer(x).dtype, y.dtype, z.dtype))
        return z

    if ambient:
        region.enter_ambient()
    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        if where == "inside":
            out = region.run(lambda x: checkpoint(block, x, use_reentrant=reentrant), x)
        else:
            out = checkpoint(lambda x: region.run(block, x), x, use_reentrant=reentrant)
        with casts_off():
            out.sum().backward()
    assert dtypes == [(torch.bfloat16, torch.float32, torch.float32)] * 2


class Own(torch.autograd.Function):
    """A function with a backward of its own; ``rule`` says what that computes, and is given."""

    @staticmethod
    def forward(ctx, x, rule):
        ctx.rule = rule
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.rule(grad)
        return grad, None


@contextlib.contextmanager
def around_backward(region, where):
    if where == "plain":
        yield
    else:
        with PassCasts(region.spec):
            yield


def in_backward(region, where, rule, hook=False):
    """Runs ``rule`` with a bf16 gradient inside a backward pass; returns what it gives."""
    results = []

    def note(grad):
        results.append(rule(grad))

    region.enter_ambient()
    x = torch.nn.Linear(2, 2)(torch.ones(2, 2))
    if hook:
        x.register_hook(note)
    loss = (x if hook else Own.apply(x, note)).sum()
    with around_backward(region, where):
        loss.backward()
    return results


PASSES = pytest.mark.parametrize("where", ["scale_loss"])

STARTS = {
    "gradient": lambda loss: loss.backward(torch.ones_like(loss)),
    "inputs": lambda loss: loss.backward(inputs=leaves(loss)),
    "autograd.backward": lambda loss: torch.autograd.backward([loss]),
    "autograd.grad": lambda loss: torch.autograd.grad(loss, leaves(loss)),
    "twice": lambda loss: (loss.backward(retain_graph=True), loss.backward()),
}


def leaves(loss):
    """Returns the parameters that a loss depends on."""
    nodes, found = [loss.grad_fn], []
    while nodes:
        node = nodes.pop()
        found += [node.variable] if hasattr(node, "variable") else []
        nodes += [after for after, _ in node.next_functions if after is not None]
    return found


def test_a_backward_pass_that_torch_refuses_is_refused_alike(region):
    with PassCasts(region.spec):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            torch.ones(2, requires_grad=True).exp().backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(torch.ones(()), [torch.ones(())])


@PASSES
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "function"])
@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (lambda g: g @ torch.ones(2, 2), torch.bfloat16),
        (lambda g: torch.ones(2, 2) @ g, torch.bfloat16),
        (lambda g: torch.einsum("ij,jk", g, torch.ones(2, 2)), torch.bfloat16),
        (lambda g: torch.addmv(torch.ones(2), g, torch.ones(2)), torch.bfloat16),
        (lambda g: torch.dot(g[0], torch.ones(2)), torch.float32),
        (lambda g: nn.functional.linear(g, torch.ones(2, 2)), torch.bfloat16),
        (lambda g: nn.functional.mse_loss(g, torch.ones(2, 2)), torch.float32),
    ],
)
def test_python_code_in_a_backward_pass_may_mix_dtypes(region, where, hook, rule, wanted):
    assert [result.dtype for result in in_backward(region, where, rule, hook)] == [wanted]


@PASSES
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "function"])
@pytest.mark.parametrize(
    "rule",
    [
        lambda g: g.exp(),
        lambda g: g.float() @ torch.ones(2, 2),
        lambda g: g.sum(),
        lambda g: g @ g,
        lambda g: g.double() @ g.double(),
        torch.prod,
        lambda g: g.clone().exp_(),
    ],
)
def test_python_code_in_a_backward_pass_keeps_one_dtype(region, where, hook, rule):
    plain = rule(torch.ones(2, 2, dtype=torch.bfloat16))
    (got,) = in_backward(region, where, rule, hook)
    assert got.dtype is plain.dtype
    assert torch.equal(got, plain)


@PASSES
@pytest.mark.parametrize("start", list(STARTS.values())[:3], ids=list(STARTS)[:3])
def test_casts_are_off_in_the_formulas_of_a_pass_and_on_again_after_it(region, where, start):
    region.enter_ambient()
    seen_inside = []
    out = nn.Linear(2, 2)(torch.ones(2, 2))
    out.register_hook(lambda grad: seen_inside.append(torch.is_autocast_enabled("cpu")))
    with around_backward(region, where):
        start(out.sum())
    assert set(seen_inside) == {False}
    assert seen() == ON


@PASSES
def test_python_code_in_a_pass_that_began_with_casts_off_is_left_alone(region, where):
    def norm(grad):
        results.append(nn.functional.layer_norm(grad, [2], torch.ones(2)).dtype)

    region.enter_ambient()
    results, out = [], nn.Linear(2, 2)(torch.ones(2, 2))
    out.register_hook(norm)
    loss = out.sum()
    with casts_off(), around_backward(region, where):
        loss.backward()
    assert results == [torch.bfloat16]


@PASSES
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("others", ["newer session", "user's autocast"])
def test_checkpoint_around_a_region_recomputes_in_its_dtype(region, where, reentrant, others):
    layer, dtypes = nn.Linear(2, 2), []

    def block(x):
        with torch.autocast("cpu", enabled=False):  # mixes dtypes, with casts off
            norm = nn.functional.layer_norm(x.bfloat16(), [2], torch.ones(2))
        y = layer(x) + norm
        dtypes.append((layer(x).dtype, norm.dtype))
        return y

    other = CastRegion(FP16)
    region.enter_ambient()
    around = contextlib.nullcontext()
    if others == "newer session":
        other.enter_ambient()
    else:
        around = torch.autocast("cpu", torch.float16)
    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False), around:
        out = checkpoint(lambda x: region.run(block, x), x, use_reentrant=reentrant)
        with around_backward(region, where):
            out.float().sum().backward()
    other.leave_ambient()
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * 2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_casts_that_a_checkpointed_function_turns_off_are_off_in_another_thread(region, reentrant):
    """autograd's device threads recompute, and have no casts of their own."""
    layer, seen_dtypes = nn.Linear(2, 2), []

    def block(x):
        with casts_off():
            y = layer(x)
            seen_dtypes.append((y.dtype, active_dtype()))
        return layer(y)

    region.enter_ambient()
    x = torch.ones(1, 2, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = checkpoint(block, x, use_reentrant=reentrant)
        in_thread(out.float().sum().backward)
    assert seen_dtypes == [(torch.float32, None)] * 2


def test_a_pass_of_a_thread_without_casts_may_mix_dtypes_in_a_block_that_names_them(region):
    def work():
        results = []
        out = region.run(nn.Linear(2, 2), torch.ones(2, 2))
        out.register_hook(lambda grad: results.append((grad @ torch.ones(2, 2)).dtype))
        with PassCasts(region.spec):
            out.sum().backward()
        return results

    assert in_thread(work) == [torch.bfloat16]


# -- float64 --------------------------------------------------------------------------------------
