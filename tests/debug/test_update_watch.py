"""Weights that do not move and gradients that underflow, as ``History`` and ``arm`` see them."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.debug.auto_trace import frozen_message, underflow_message
from apex.debug.loops import loop_of
from apex.debug.update_watch import EVERY, Counts, UpdateWatch, summary
from apex.optimizers import FusedAdam
from benchmarks.counting import counted_syncs
from tests.debug.test_plain_loops import Plain, bf16_autocast, bf16_model, fp16_autocast, fused, sgd
from tests.training.cases import batch, batches, net, prepared, train_step


def by_name(history):
    return {item.module: item for item in history.modules}


def weight_of(values, dtype=torch.bfloat16):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


# -- updates ---------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "foreach adam": lambda params: torch.optim.Adam(params, lr=1e-3, foreach=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_update_below_half_the_rounding_step_is_frozen(make):
    # The rounding step of bf16 below 1 is 2**-9, and that below 0.01 about 2**-15.
    weight = weight_of([1.0, 0.01, 1.0, 0.01])
    optimizer = make([weight])
    with amp.debug.History(optimizer, updates_every=1) as history:
        for _ in range(3):
            weight.grad = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.bfloat16)
            optimizer.step()
    (found,) = history.modules
    assert found.weights == 9  # three of four have a gradient
    assert found.frozen == pytest.approx(1 / 3)


def test_the_sampled_shares_are_those_of_the_exact_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    history = amp.debug.History(optimizer, model=model, updates_every=1)
    exact = {"0": [0, 0], "2": [0, 0]}
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 128).bfloat16()).float().square().mean().mul(64).backward()
        before = [(p, p.detach().clone(), p.grad != 0) for p in model.parameters()]
        optimizer.step()
        for (p, old, wanted), name in zip(before, ["0", "0", "2", "2"], strict=True):
            exact[name][0] += int((wanted & (p == old)).sum())
            exact[name][1] += int(wanted.sum())
    for name, found in by_name(history).items():
        frozen, wanted = exact[name]
        assert 0.02 < frozen / wanted < 0.98
        assert found.frozen == pytest.approx(frozen / wanted, abs=0.1)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gap"])
def test_weights_in_any_memory_layout_are_measured(layout):
    values = torch.rand(4, 3, 2, 2).add(1.0).bfloat16()
    if layout == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        values = values.transpose(0, 2)
    else:
        values = torch.ones(4, 3, 2, 4, dtype=torch.bfloat16)[..., ::2]
    weight = nn.Parameter(values)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    history = amp.debug.History(optimizer, updates_every=1)
    weight.grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    weight.grad[0] = 1.0  # too little
    weight.grad[1] = 1000.0
    optimizer.step()
    (found,) = history.modules
    assert (found.weights, found.frozen) == (2 * weight[0].numel(), 0.5)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_hold_what_16_bits_do_not(level, log):
    model, optimizer = prepared(level, lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True))
    amp.debug.arm(optimizer)
    history = amp.debug.History(optimizer, updates_every=1)
    for x, y in batches(EVERY + 1):
        train_step(model, optimizer, x, y)
    assert log() == []
    assert [(m.module, m.weights, m.frozen) for m in history.modules] == [
        ("0", 0, 0.0),
        ("2", 0, 0.0),
    ]


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_without_masters_levels_are_measured(level, log):
    options = {} if level == "O3" else {"master_weights": False}
    model, optimizer = prepared(level, lambda p: torch.optim.SGD(p, lr=1e-6), **options)
    history = amp.debug.History(optimizer)
    amp.debug.arm(optimizer)
    for x, y in batches(EVERY):
        train_step(model, optimizer, x, y)
    assert all(m.frozen > 0.9 for m in history.modules)
    (message,) = log()
    assert message.startswith("Weights do not move: over 16 updates, ")
    assert "level with fp32 masters ('O2', 'O5')" in message


def test_groups_without_a_learning_rate_are_not_to_move():
    optimizer = torch.optim.SGD([weight_of([1.0])], lr=0.0)
    history = amp.debug.History(optimizer, updates_every=1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.step()
    assert history.modules[0].weights == 0


def test_a_step_that_a_kernel_skips_is_not_frozen():
    optimizer = torch.optim.SGD([weight_of([1.0])], lr=1.0, fused=True)
    history = amp.debug.History(optimizer, updates_every=1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf
    optimizer.step()
    assert (history.modules[0].weights, history.modules[0].frozen) == (1, 0.0)


def test_arm_names_modules_that_do_not_move(log):
    loop = bf16_model(make=lambda p: torch.optim.AdamW(p, lr=1e-6))
    amp.debug.arm(loop.optimizer, **loop.watched)
    for x, y in batches(3 * EVERY):
        loop.step(x, y)
    (message,) = log()
    assert " in 0" in message
    assert " in 2" in message
    assert "opt_level='O5'" in message


@pytest.mark.parametrize("make", [bf16_autocast, Plain, fp16_autocast], ids=lambda m: m.__name__)
def test_arm_is_silent_where_fp32_weights_are_stepped(make, log):
    loop = make(make=lambda p: torch.optim.AdamW(p, lr=1e-6))
    amp.debug.arm(loop.optimizer, **loop.watched)
    for x, y in batches(2 * EVERY + 1):
        loop.step(x, y)
    assert log() == []


@pytest.mark.parametrize("keeps", [False, True])
def test_masters_and_compensations_in_the_state_hold_the_difference(keeps):
    weight = weight_of([1.0] * 8)
    optimizer = FusedAdam([weight], lr=1e-6, capturable=keeps, master_weights=keeps)
    history = amp.debug.History(optimizer, updates_every=1)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    (found,) = history.modules
    assert (found.weights, found.frozen) == ((0, 0.0) if keeps else (16, 1.0))
    plain = torch.optim.SGD([weight], lr=1e-6)
    plain.state[weight]["kahan_comp"] = torch.zeros_like(weight) if keeps else torch.zeros(3)
    history = amp.debug.History(plain, updates_every=1)
    plain.step()
    assert history.modules[0].weights == (0 if keeps else 8)


class Stochastic(torch.optim.SGD):
    """Rounds each update up or down at random, so that it is right on average."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                wide = param.float() - group["lr"] * param.grad.float()
                bits = wide.view(torch.int32) + torch.randint(2**16, param.shape, dtype=torch.int32)
                param.copy_((bits & ~0xFFFF).view(torch.float32))


def test_arm_is_silent_where_updates_are_rounded_at_random(log):
    torch.manual_seed(0)
    weight = weight_of([[1.5] * 64])
    optimizer = Stochastic([weight], lr=1e-3)  # a seventh of the rounding step
    amp.debug.arm(optimizer, model=nn.Linear(1, 1))
    history = amp.debug.History(optimizer, updates_every=1)
    for _ in range(2 * EVERY):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert log() == []
    assert history.modules[0].frozen > 0.5  # but each single update moves few


# -- gradients -------------------------------------------------------------------------------


def small_loss(loop, factor, steps=1, **history):
    found = amp.debug.History(loop.optimizer, **loop.watched, **history)
    for x, y in batches(steps):
        loop.step(x, y, factor=factor)
    return by_name(found)


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))


@pytest.mark.parametrize("factor", [2e-5, 2e-6])
def test_underflow_is_estimated_from_the_smallest_gradients(factor):
    loop = Plain(wide_net(), autocast=torch.float16)
    found = small_loss(loop, factor)
    loop = Plain(wide_net())
    small_loss(loop, factor)
    for name in ("0", "2"):
        true = torch.cat([p.grad.flatten() for p in loop.model.get_submodule(name).parameters()])
        lost = float((true.abs() < 2.0**-25).logical_and(true != 0).sum()) / true.numel()
        assert lost / 3 < found[name].underflow <= found[name].zeros + 1e-9 or lost < 0.05


@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["sgd", "fused"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_scale_that_keeps_gradients_in_range_shows_none(optimizer, clip):
    loop = Plain(
        wide_net(), optimizer, autocast=torch.float16, scale=2.0**14, clip=clip and optimizer is sgd
    )
    found = small_loss(loop, 1e-4)
    assert [item.underflow for item in found.values()] == [0.0, 0.0]
    assert found["0"].gradients > 0


@pytest.mark.parametrize("make", [Plain, bf16_autocast, bf16_model], ids=lambda m: m.__name__)
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e-9])
def test_gradients_of_other_dtypes_do_not_underflow(make, factor):
    found = small_loss(make(), factor, steps=3, updates_every=1)
    assert [item.underflow for item in found.values()] == [0.0, 0.0]


def test_zeros_of_unused_rows_are_no_underflow():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = amp.debug.History(optimizer, model=model)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.tensor([1, 2, 3])).float().sum()
    loss.backward()
    optimizer.step()
    found = by_name(history)["0"]
    assert found.zeros > 0.9
    assert found.underflow == 0.0


def test_what_is_all_zero_underflowed_if_others_did():
    some = Counts(0, 0, 100, 40, 30)
    zeros = Counts(0, 0, 100, 100, 0)
    fine = Counts(0, 0, 100, 0, 0)

    def underflow(*counts, fp16=False):
        measured = dict(zip("abc", counts, strict=False))
        return [item.underflow for item in summary([measured], fp16=fp16)]

    assert underflow(some, zeros)[1] == 1.0
    assert underflow(fine, zeros, fp16=True) == [0.0, 0.0]
    assert underflow(zeros, zeros) == [0.0, 0.0]  # in fp32, say
    assert underflow(zeros, zeros, fp16=True) == [1.0, 1.0]


@pytest.mark.parametrize("scale", [2.0**-24 * n for n in (0.3, 1.0, 3.0, 30.0, 300.0)])
@pytest.mark.parametrize("shape", ["laplace", "normal"])
def test_the_estimate_is_near_the_truth(scale, shape):
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(2, (4096,), generator=generator) * 2 - 1
    if shape == "laplace":
        true = sign * torch.empty(4096).exponential_(generator=generator) * scale
    else:
        true = torch.randn(4096, generator=generator) * scale
    rounded = true.half()
    counts = Counts(0, 0, 4096, int((rounded == 0).sum()), int((rounded.abs() == 2.0**-24).sum()))
    lost = counts.zeros / 4096
    assert counts.underflow == pytest.approx(lost, rel=0.5, abs=0.01)
    assert counts.underflow <= lost


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("scaled", [False, True])
def test_levels_in_fp16_are_measured_with_their_scale(level, scaled, log):
    model, optimizer = prepared(level, model=wide_net(), loss_scale=2.0**14 if scaled else 1.0)
    history = amp.debug.History(optimizer)
    amp.debug.arm(optimizer)
    for x, y in batches(EVERY + 1):
        optimizer.zero_grad()
        loss = 2e-6 * ((model(x).float() - y) ** 2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    worst = max(item.underflow for item in history.modules)
    assert (worst == 0.0) if scaled else (worst > 0.1)
    if not scaled:
        for x, y in batches(EVERY):
            train_step(model, optimizer, x, y)
    assert len(log()) == (0 if scaled else 1)


def test_arm_names_modules_whose_gradients_underflow(log):
    loop = Plain(wide_net(), autocast=torch.float16)
    amp.debug.arm(loop.optimizer, **loop.watched)
    for x, y in batches(2 * EVERY):
        loop.step(x, y, factor=2e-6)
    (message,) = log()
    assert message.startswith("Gradients underflow: about ")
    assert "torch.amp.GradScaler" in message


def test_arm_says_when_all_gradients_are_zero(log):
    loop = Plain(autocast=torch.float16)
    amp.debug.arm(loop.optimizer, **loop.watched)
    for x, y in batches(EVERY):
        loop.step(x, y, factor=1e-12)
    assert log() == []
    for x, y in batches(EVERY):
        loop.step(x, y, factor=1e-12)
    (message,) = log()
    assert message.startswith("All sampled gradients are 0, again after 16 updates")
    assert "torch.amp.GradScaler" in message


# -- cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fp16_autocast, bf16_model], ids=lambda m: m.__name__)
def test_measuring_waits_for_nothing(make):
    loop = make(make=fused if make is fp16_autocast else sgd)
    history = amp.debug.History(loop.optimizer, **loop.watched, updates_every=1)
    loop.step(*batch())
    x, y = batch()
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(x, y)).backward()
    loop.scaler.unscale_(loop.optimizer)
    with counted_syncs() as counts:
        loop.optimizer.step()
    assert not counts
    assert history.modules


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_device_nothing_waits_until_modules_are_read(dtype):
    model = net().cuda().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    history = amp.debug.History(optimizer, model=model, updates_every=1)
    x = batch()[0].cuda().to(dtype)

    def step():
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(history.passes) == 2
    assert all(item.weights + item.gradients > 0 for item in history.modules)


@pytest.mark.gpu(devices=2)
def test_parameters_on_several_devices_are_measured_without_a_wait():
    sizes = {"cpu": 3, "cuda:0": 4, "cuda:1": 5}
    weights = [
        nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device))
        for device, size in sizes.items()
    ]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    history = amp.debug.History(optimizer, updates_every=1, grad_norms=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (found,) = history.modules
    assert (found.weights, found.frozen) == (12, 1.0)


def test_no_measurement_leaves_the_step_alone():
    loop = bf16_model()
    history = amp.debug.History(loop.optimizer, updates_every=None)
    assert not loop.optimizer._optimizer_step_pre_hooks
    loop.step(*batch())
    assert [item.weights for item in history.modules] == [0]
    with pytest.raises(ValueError, match="updates_every is 0"):
        amp.debug.History(loop.optimizer, updates_every=0)


def test_parameters_may_come_and_go():
    loop = bf16_model()
    history = amp.debug.History(loop.optimizer, model=loop.model, updates_every=2)
    loop.step(*batch())
    loop.model.append(nn.Linear(2, 2).bfloat16())
    loop.optimizer.add_param_group({"params": list(loop.model[3].parameters())})
    loop.model[0].weight.requires_grad_(False)
    loop.model[0].weight.grad = None
    for x, y in batches(3):
        loop.optimizer.zero_grad()
        loop.loss(x, y).backward()
        loop.optimizer.step()
    found = by_name(history)
    assert found["3"].weights > 0


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantized weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


class Nothing(torch.optim.SGD):
    def step(self, closure=None):
        pass


def test_weights_of_other_kinds_are_passed_over():
    odd = nn.Parameter(Wrapped(torch.ones(4, dtype=torch.bfloat16)))
    odd.grad = torch.ones(4, dtype=torch.bfloat16)
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    complex_.grad = torch.ones_like(complex_)
    fine = weight_of([1.0])
    fine.grad = torch.ones_like(fine)
    empty = nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    optimizer = Nothing([odd, sparse.weight, complex_, fine, empty], lr=1.0)
    history = amp.debug.History(optimizer, grad_norms=False, updates_every=1)
    optimizer.step()
    (found,) = history.modules
    assert (found.weights, found.gradients) == (1, 0)


def test_messages_leave_out_modules_with_few_samples():
    class Told:
        keeps_fp32 = scales = "Do"

    few = summary([{"a": Counts(4, 4, 7, 3, 4)}], fp16=True)
    many = summary([{"a": Counts(40, 40, 40, 36, 4)}], fp16=True)
    assert (frozen_message(few, Told), underflow_message(few, Told)) == ("", "")
    assert "100 % in a" in frozen_message(many, Told)
    assert "90.0 % in a" in underflow_message(many, Told)


def test_a_window_ends_without_its_parameter():
    loop = bf16_model()
    seen = []
    plain = loop_of("History", [loop.optimizer])
    UpdateWatch(plain, seen.append, every=2, span=2)
    loop.step(*batch())
    loop.optimizer.param_groups[0]["params"].pop()
    loop.model[2].bias = None
    loop.step(*batch())
    assert seen == []
    plain.stop()
    assert not loop.optimizer._optimizer_step_post_hooks
