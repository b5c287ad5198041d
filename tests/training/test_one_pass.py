"""The step in one pass: gradients stay in 16 bits, and everybody sees what they saw before."""

import copy
import functools
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine.optimizer import deferred, one_pass
from apex._engine.optimizer.optimizer_class import binding_of
from apex._torch import blocks
from apex.optimizers import FusedAdam, FusedSGD
from benchmarks.loops import fused_adamw, with_amp
from benchmarks.memory import peak_bytes
from tests.support.reference.loops import Loop
from tests.support.two_pass import two_pass_steps
from tests.training import cases
from tests.training.test_cost import reads_of

may_step_without_gradients = pytest.mark.filterwarnings(
    "ignore:optimizer.step.. was called before any backward pass"
)

FUSED = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "Adam maximize": lambda p: torch.optim.Adam(
        p, lr=1e-2, weight_decay=0.1, maximize=True, fused=True
    ),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True, fused=True
    ),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, fused=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
    "FusedAdam capturable": lambda p: FusedAdam(p, lr=1e-2, adam_w_mode=False, capturable=True),
    "FusedSGD": lambda p: FusedSGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, set_grad_none=True
    ),
}
SCALES = {"O2": [128.0, 1000.0, "dynamic"], "O5": [1.0, 128.0, "dynamic"]}
LEVEL_SCALES = [(level, scale) for level, scales in SCALES.items() for scale in scales]

optimizers = pytest.mark.parametrize("name", FUSED)
levels = pytest.mark.parametrize("level", cases.WITH_MASTERS)
level_scales = pytest.mark.parametrize(("level", "scale"), LEVEL_SCALES)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Tiny models step in one pass, in blocks of half a layer."""
    monkeypatch.setattr(one_pass, "least_elements", 1)
    monkeypatch.setattr(blocks, "_LEAST", 16)


def after_backward(level, scale=None, name="AdamW", passes=1, **options):
    model, optimizer = cases.prepared(level, FUSED[name], loss_scale=scale, **options)
    for x, y in cases.batches(passes):
        cases.backward(model, optimizer, 0.1 * x, 0.1 * y)
    return model, optimizer


def are_deferred(optimizer):
    return [deferred.of(param) is not None for param in amp.master_params(optimizer)]


def in_two_passes(fn):
    with two_pass_steps():
        return fn()


def results(model, optimizer):
    """All that a training leaves, to the bit."""
    return (
        cases.masters(optimizer),
        [param.detach().clone() for param in model.parameters()],
        cases.grads(amp.master_params(optimizer)),
        cases.grads(model.parameters()),
        copy.deepcopy(optimizer.state_dict()["state"]),
    )


def assert_same_in_two_passes(train):
    """``train`` returns a model and an optimizer."""
    one, two = results(*train()), in_two_passes(lambda: results(*train()))
    for first, second in zip(one, two, strict=True):
        assert cases.same(first, second)


# -- the bits --------------------------------------------------------------------------------


@optimizers
@pytest.mark.parametrize(
    ("level", "scale"),
    [(level, scale) for level, scale in LEVEL_SCALES if scale != 1000.0],  # the loop divides by it
)
def test_training_equals_the_plain_loop(level, scale, name):
    model, optimizer = cases.prepared(level, FUSED[name], loss_scale=scale, growth_interval=2)
    loop = Loop(level, cases.net().parameters(), FUSED[name], scale=scale, interval=2)
    for x, y in cases.batches(8, overflow_at={0, 3} if scale == "dynamic" else ()):
        assert cases.same(cases.train_step(model, optimizer, x, y), loop.train_step(x, y))
        assert all(are_deferred(optimizer))
        assert cases.loss_scale() == loop.scale
        assert cases.same(list(model.parameters()), loop.model)
        assert cases.same(cases.masters(optimizer), loop.stepped)
    assert cases.same(optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])


@levels
def test_a_parameter_made_of_the_memory_of_a_weight_is_stepped_in_its_place(level):
    """As by ``weight_norm`` of a prepared layer; the old weight stays in its group."""
    model, optimizer = cases.prepared(level, FUSED["SGD"], loss_scale=128.0)
    old = model[0].weight
    model[0].weight = nn.Parameter(old.data)
    optimizer.add_param_group({"params": [model[0].weight]})
    before = old.detach().clone()
    cases.train_step(model, optimizer, *cases.batch())
    *_, master = amp.master_params(optimizer)
    assert torch.equal(model[0].weight, master.to(old.dtype))
    assert not torch.equal(model[0].weight, before)
    assert torch.equal(old, before)


@levels
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_has_the_same_bits_also_in_the_longer_blocks_of_a_large_model(level, norm_type):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(37, 53), nn.BatchNorm1d(53), nn.Linear(53, 41))
        model.unused = nn.Parameter(torch.empty(0))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        model.unused.grad = torch.empty_like(model.unused)
        cases.backward(model, optimizer, torch.randn(4, 37), torch.zeros(4, 41))
        amp.clip_grad_norm_(optimizer, 0.1, norm_type)
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@optimizers
def test_a_loop_without_scale_loss_steps_in_one_pass_with_the_same_bits(name):
    def train(passes=2):
        model, optimizer = cases.prepared("O5", FUSED[name])
        data = list(cases.batches(3 * passes))
        for step in range(3):
            optimizer.zero_grad()
            for x, y in data[step * passes : (step + 1) * passes]:
                cases.loss_of(model, x, y).backward()
            binding_of(optimizer).settle()
            if one_pass.enabled:
                assert all(are_deferred(optimizer))
            optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@pytest.mark.parametrize("reads", [False, True])
@levels
def test_an_overflow_of_one_optimizer_skips_another_that_shares_weights(level, reads):
    model = cases.net()
    one, two = FUSED["AdamW"](model.parameters()), FUSED["AdamW"](model[0].parameters())
    model, optimizers = amp.initialize(
        model, [one, two], opt_level=level, loss_scale="dynamic", verbosity=0
    )

    def backward(loss, optimizers):
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()

    x, y = cases.batch()
    backward(cases.loss_of(model, x, y), optimizers)
    backward((model[2].bias.float() * torch.inf).sum(), [one])
    if reads:
        grads = pickle.dumps([param.grad for param in amp.master_params(two)])
        assert b"apex" not in grads
        assert all(type(grad) is torch.Tensor and not vars(grad) for grad in pickle.loads(grads))
    backward(cases.loss_of(model, x, y), optimizers)
    before = cases.masters(two)
    two.step()
    assert cases.same(cases.masters(two), before)


def test_a_plain_pass_after_a_plain_one_adds_up_and_a_change_between_counts():
    def train():
        model, optimizer = cases.prepared("O5", FUSED["AdamW"])
        for x, y in cases.batches(2):
            cases.loss_of(model, x, y).backward()
            binding_of(optimizer).settle()
            model[0].weight.grad.mul_(0.5)
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@level_scales
@pytest.mark.parametrize("passes", [2, 3])
def test_accumulation_sums_in_fp32(level, scale, passes):
    def train():
        model, optimizer = cases.prepared(level, FUSED["AdamW"], loss_scale=scale)
        data = list(cases.batches(3 * passes))
        for step in range(3):
            optimizer.zero_grad()
            for x, y in data[step * passes : (step + 1) * passes]:
                cases.backward(model, optimizer, x, y)
            assert not any(are_deferred(optimizer))
            optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@levels
def test_losses_of_different_layers_stay_deferred(level):
    """Each of two blocks reaches one layer; the first layer's gradient waits during the second."""

    def train():
        model, optimizer = cases.prepared(level, FUSED["AdamW"], num_losses=2, loss_scale=128.0)
        first, _, second = model
        for x, _ in cases.batches(2):
            optimizer.zero_grad()
            half = x.to(first.weight.dtype)
            for loss_id, out in enumerate((first(half), second(torch.cat([half, half], 1)))):
                loss = out.float().pow(2).mean()
                with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@levels
def test_several_optimizers_and_a_shared_weight(level):
    def train():
        model = cases.net()
        one = FUSED["AdamW"](model.parameters())
        two = FUSED["SGD momentum"](model[2].parameters())
        three = torch.optim.Adam(model[0].parameters(), lr=1e-3)  # in Python: takes fp32
        model, owners = amp.initialize(model, [one, two, three], opt_level=level, verbosity=0)
        for x, y in cases.batches(3):
            for owner in owners:
                owner.zero_grad()
            cases.backward(model, owners, x, y)
            for owner in owners:
                owner.step()
        return model, one

    assert_same_in_two_passes(train)


@levels
@pytest.mark.parametrize("late", [False, True])
def test_a_model_in_channels_last(level, late):
    def train():
        net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        with torch.no_grad():
            for i, param in enumerate(net.parameters()):
                param.copy_(torch.linspace(-0.1, 0.1, param.numel()).reshape(param.shape) + i / 99)
        if not late:
            net = net.to(memory_format=torch.channels_last)
        model, optimizer = cases.prepared(level, FUSED["SGD momentum"], net, loss_scale=16.0)
        if late:
            model = model.to(memory_format=torch.channels_last)
        for seed in range(3):
            x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            amp.clip_grad_norm_(optimizer, 1e-3)
            optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


def test_gradients_that_wait_follow_a_model_that_is_moved_there_and_back():
    def train():
        torch.manual_seed(0)
        model, optimizer = cases.prepared("O5", FUSED["SGD"], nn.Conv2d(6, 4, 1))
        with amp.scale_loss(
            model(torch.randn(2, 6, 3, 3)).float().pow(2).mean(), optimizer
        ) as loss:
            loss.backward()
        model.to(memory_format=torch.channels_last)  # the gradient of the weight has new memory
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.to(memory_format=torch.contiguous_format)
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


def test_the_norm_of_a_model_moved_to_channels_last_has_the_same_bits():
    def norm(seed):
        torch.manual_seed(seed)
        net = nn.Conv2d(8, 33, 5)
        model, optimizer = cases.prepared("O5", FUSED["SGD"], net)
        model = model.to(memory_format=torch.channels_last)
        with amp.scale_loss(
            model(torch.randn(2, 8, 9, 9)).float().pow(2).mean(), optimizer
        ) as loss:
            loss.backward()
        return amp.clip_grad_norm_(optimizer, 1e-3)

    for seed in range(20):  # of which the order of the sum shows in 9
        assert norm(seed) == in_two_passes(lambda seed=seed: norm(seed))


@levels
def test_a_closure(level):
    def train():
        model, optimizer = cases.prepared(level, FUSED["AdamW"])
        for x, y in cases.batches(3):
            cases.train_step_with_closure(model, optimizer, x, y)
        return model, optimizer

    assert_same_in_two_passes(train)


# -- who reads a gradient gets it ------------------------------------------------------------


@level_scales
def test_the_gradients_read_as_before(level, scale):
    model, optimizer = after_backward(level, scale)
    assert all(are_deferred(optimizer))
    expected = in_two_passes(lambda: results(*after_backward(level, scale)))
    mirrors = cases.grads(model.parameters())
    assert cases.same(mirrors, expected[3])
    assert cases.same(cases.grads(amp.master_params(optimizer)), expected[2])
    assert cases.same(cases.grads(model.parameters()), expected[3])
    assert all(p.grad.dtype is torch.float32 for p in amp.master_params(optimizer))
    assert cases.same(cases.grads(amp.master_params(optimizer)), expected[2])
    assert not any(are_deferred(optimizer))


@level_scales
def test_the_masters_gradients_read_first(level, scale):
    model, optimizer = after_backward(level, scale)
    expected = in_two_passes(lambda: results(*after_backward(level, scale)))
    assert cases.same(cases.grads(amp.master_params(optimizer)), expected[2])
    assert cases.same(cases.grads(model.parameters()), expected[3])


READS = {
    "numpy": lambda g: torch.from_numpy(g.float().numpy()),
    "list": lambda g: torch.tensor(g.tolist()),
    "copy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "data": lambda g: g.data,
    "view": lambda g: g.view(-1).view(g.shape),
    "stack": lambda g: torch.stack([g, g])[0],
    "foreach": lambda g: torch._foreach_mul([g], 1.0)[0],
    "out": lambda g: torch.add(g, 0.0, out=torch.empty_like(g)),
}


@level_scales
@pytest.mark.parametrize("way", READS)
def test_every_way_to_read_a_models_gradient(level, scale, way):
    model, _ = after_backward(level, scale)
    expected = in_two_passes(lambda: cases.grads(after_backward(level, scale)[0].parameters()))
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(READS[way](param.grad).to(grad.dtype), grad)
        assert repr(param.grad) == repr(grad)


WRITES = {
    "mul_": lambda p: p.grad.mul_(0.5),
    "imul": lambda p: p.grad.__imul__(0.5),
    "assigned": lambda p: setattr(p, "grad", p.grad * 0.5),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "detached": lambda p: p.grad.detach().mul_(0.5),
    "view": lambda p: p.grad.view(-1)[:1].zero_(),
    "index": lambda p: p.grad.__setitem__(0, 0.0),
    "out": lambda p: torch.mul(p.grad, 0.5, out=p.grad),
    "backward": lambda p: (p.float() * 0.5).sum().backward(),
    "clamp": lambda p: nn.utils.clip_grad_value_([p], 1e-3),
    "cleared": lambda p: setattr(p, "grad", None),
    "zeroed": lambda p: p.grad.zero_(),
}


@may_step_without_gradients
@level_scales
@pytest.mark.parametrize("way", WRITES)
def test_every_way_to_write_a_models_gradient(level, scale, way):
    def train():
        model, optimizer = after_backward(level, scale)
        for param in model.parameters():
            WRITES[way](param)
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


WRITES_OF_OLD_SCRIPTS = {
    "data": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "assigned data": lambda p: setattr(p.grad, "data", p.grad.data * 0.5),
    "detach_": lambda p: p.grad.detach_().zero_(),
}


@levels
@pytest.mark.parametrize("way", WRITES_OF_OLD_SCRIPTS)
def test_every_way_in_which_old_scripts_write_a_models_gradient(level, way):
    def train():
        model, optimizer = after_backward(level)
        for param in model.parameters():
            WRITES_OF_OLD_SCRIPTS[way](param)
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


MASTER_WRITES = {
    "mul_": lambda p: p.grad.mul_(0.5),
    "assigned": lambda p: setattr(p, "grad", torch.ones_like(p)),
    "backward": lambda p: (p * 0.5).sum().backward(),
    "deleted": lambda p: delattr(p, "grad"),
}


@may_step_without_gradients
@levels
@pytest.mark.parametrize("way", MASTER_WRITES)
def test_every_way_to_write_a_masters_gradient(level, way):
    def train():
        model, optimizer = after_backward(level)
        for param in amp.master_params(optimizer):
            MASTER_WRITES[way](param)
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@levels
def test_a_refused_assignment_leaves_a_masters_gradient(level):
    _, optimizer = after_backward(level)
    expected = in_two_passes(lambda: cases.grads(amp.master_params(after_backward(level)[1])))
    for param in amp.master_params(optimizer):
        with pytest.raises(RuntimeError, match="size"):
            param.grad = torch.zeros(3, 2, 1)
    assert cases.same(cases.grads(amp.master_params(optimizer)), expected)


@may_step_without_gradients
@levels
@pytest.mark.parametrize("clear", ["optimizer", "model", "hand", "optimizer to zero"])
def test_cleared_gradients_are_gone(level, clear):
    model, optimizer = after_backward(level)
    held = [param.grad for param in model.parameters()]
    values = in_two_passes(lambda: cases.grads(after_backward(level)[0].parameters()))
    if clear == "hand":
        for param in model.parameters():
            param.grad = None
    elif clear == "model":
        model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=clear == "optimizer")
    before = cases.masters(optimizer)
    left = cases.grads(amp.master_params(optimizer))
    if clear == "optimizer to zero":
        assert all(not grad.any() for grad in left)
    else:
        assert left == [None] * 4
        assert cases.same(held, values)  # what a script holds stays
        optimizer.step()
        assert cases.same(cases.masters(optimizer), before)


def test_hooks_of_the_step_read_fp32_gradients():
    expected = in_two_passes(lambda: results(*after_backward("O2"))[2])
    seen = []

    def look(optimizer, args, kwargs):
        seen.append(cases.grads(p for group in optimizer.param_groups for p in group["params"]))

    for register in ("register_step_pre_hook", "register_step_post_hook"):
        _, optimizer = after_backward("O2")
        getattr(optimizer, register)(look)
        optimizer.step()
    assert cases.same(seen, [expected] * 2)


@levels
def test_a_post_hook_that_writes_masters_by_foreach_reaches_the_model(level):
    model, optimizer = after_backward(level)
    optimizer.register_step_post_hook(
        lambda own, *_: torch._foreach_mul_([p.detach() for p in amp.master_params(own)], 2.0)
    )
    optimizer.step()
    rounded = [p.detach().to(next(model.parameters()).dtype) for p in amp.master_params(optimizer)]
    assert cases.same(list(model.parameters()), rounded)


@levels
def test_an_optimizer_that_clips_reads_the_true_gradients(level):
    def train():
        make = functools.partial(FusedAdam, max_grad_norm=0.1)
        model, optimizer = cases.prepared(level, make)
        for x, y in cases.batches(3):
            cases.train_step(model, optimizer, x, y)
        return model, optimizer

    assert_same_in_two_passes(train)


class SignOfTorch(torch.optim.AdamW):
    """An optimizer of a user's own, in Python, over torch's fused step."""

    def step(self, closure=None):
        """Sign of the gradients first."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = param.grad.sign()
        return super().step(closure)


class SignOfApex(FusedAdam):
    """The same over a method of apex's."""

    def update(self, batch, step, gate):
        """Sign of the gradients first."""
        batch.grads = [torch.tensor(grad.tolist()).sign() for grad in batch.grads]
        super().update(batch, step, gate)


@levels
@pytest.mark.parametrize(
    "make", [functools.partial(SignOfTorch, fused=True), SignOfApex], ids=["torch", "apex"]
)
def test_an_optimizer_with_a_step_of_its_own_gets_fp32_gradients(level, make):
    def train():
        model, optimizer = cases.prepared(level, make)
        for x, y in cases.batches(3):
            cases.train_step(model, optimizer, x, y)
        return model, optimizer

    assert_same_in_two_passes(train)
    assert not any(are_deferred(train()[1]))


@levels
def test_an_optimizer_that_stops_being_fused_gets_fp32_gradients(level):
    def train():
        model, optimizer = after_backward(level)
        for group in optimizer.param_groups:
            group["fused"] = False
        optimizer.step()
        return model, optimizer

    assert_same_in_two_passes(train)


@levels
def test_a_scheduler_from_before_initialize(level):
    def train():
        model = cases.net()
        optimizer = FUSED["AdamW"](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for x, y in cases.batches(3):
            cases.train_step(model, optimizer, x, y)
            scheduler.step()
        return model, optimizer

    assert_same_in_two_passes(train)


# -- objects stay whole ----------------------------------------------------------------------


@levels
def test_masters_with_deferred_gradients_copy_and_pickle_as_plain_ones(level):
    model, optimizer = after_backward(level)
    for param in amp.master_params(optimizer):
        copied, loaded = copy.deepcopy(param), pickle.loads(pickle.dumps(param))
        assert type(loaded) is nn.Parameter
        assert copied.grad is None
        assert torch.equal(copied, param)
    twin, own = copy.deepcopy((model, optimizer))
    x, y = cases.batch()
    cases.train_step(model, optimizer, x, y)
    cases.train_step(twin, own, x, y)
    assert cases.same(cases.masters(optimizer), cases.masters(own))


class Stopped(Exception):
    pass


@levels
def test_a_step_that_fails_leaves_gradients_readable_and_the_model_rounded(level, monkeypatch):
    model, optimizer = after_backward(level)
    expected = in_two_passes(lambda: results(*after_backward(level))[2])
    run, calls = blocks.InPlace.load, []

    def fail(self, block):
        calls.append(block)
        if len(calls) > 5:
            raise Stopped
        return run(self, block)

    monkeypatch.setattr(blocks.InPlace, "load", fail)
    with pytest.raises(Stopped):
        optimizer.step()
    monkeypatch.undo()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert cases.same(cases.grads(amp.master_params(optimizer)), expected)
    masters = cases.masters(optimizer)
    assert cases.same(list(model.parameters()), [m.to(model[0].weight.dtype) for m in masters])


@levels
def test_restore_hands_over_the_gradients(level):
    expected = in_two_passes(lambda: results(*after_backward(level))[2])
    model, optimizer = after_backward(level)
    amp.restore(model, optimizer)
    assert cases.same([p.grad for p in model.parameters()], [g.float() for g in expected])


@levels
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adagrad"])
def test_no_host_read(level, name):
    assert reads_of(*cases.prepared(level, FUSED[name]), cases.train_step) == 0


# -- where it engages ------------------------------------------------------------------------


def test_small_models_and_optimizers_in_python_take_two_passes(monkeypatch):
    assert all(are_deferred(after_backward("O5")[1]))
    model, optimizer = cases.prepared("O5", cases.OPTIMIZERS["Adam"])
    cases.backward(model, optimizer, *cases.batch())
    assert not any(are_deferred(optimizer))
    monkeypatch.setattr(one_pass, "least_elements", 10**6)
    assert not any(are_deferred(after_backward("O5")[1]))


def test_the_debug_switch_turns_it_off_and_on_again():
    with two_pass_steps():
        assert not any(are_deferred(after_backward("O5")[1]))
    assert all(are_deferred(after_backward("O5")[1]))


# -- memory ----------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("make", [fused_adamw, FusedAdam], ids=["AdamW", "FusedAdam"])
def test_an_iteration_peaks_at_what_is_stored_and_16_bit_gradients(
    level, max_norm, make, monkeypatch
):
    """By itself, at the sizes for which it is meant: 3 M parameters."""
    monkeypatch.undo()
    params = 3 * 1024**2
    task = replace(cases.large_task(), optimizer=make)
    peak = peak_bytes(with_amp(task, level, max_norm=max_norm), 14 * params) / params
    # One block of 2**19 elements is 0.67 bytes per parameter.
    assert 16.0 <= peak <= 16.7
    with two_pass_steps():
        work = with_amp(task, level, max_norm=max_norm)
        assert peak_bytes(work, 14 * params) / params >= 19.9


def test_an_iteration_without_scale_loss_peaks_there_too(monkeypatch):
    monkeypatch.undo()
    task = cases.large_task()
    model = task.model()
    model, optimizer = cases.prepared("O5", fused_adamw, model=model)
    x, y = task.batch()

    def iteration():
        nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    params = 3 * 1024**2
    assert 16.0 <= peak_bytes(iteration, 14 * params) / params <= 16.7
