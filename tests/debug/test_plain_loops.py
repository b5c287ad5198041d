"""``amp.debug`` without ``amp.initialize``: torch.autocast, GradScaler, 16-bit and fp32 models."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from apex import amp
from tests.training.cases import batch, batches, net


def sgd(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr)


def fused(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class Plain:
    """A training loop of plain torch.

    Attributes:
        norms: The norm of the unscaled gradients of every iteration.
    """

    def __init__(self, model=None, make=sgd, *, autocast=None, scale=None, clip=False, wrap=None):
        self.model = net() if model is None else model
        self.optimizer = make(self.model.parameters())
        self.called = self.model if wrap is None else wrap(self.model)
        self.autocast = autocast
        enabled = scale is not None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=enabled)
        self.clip = clip
        self.norms = []

    @property
    def watched(self):
        return {"model": self.model, "scaler": self.scaler}

    def loss(self, x, y):
        dtype = next(self.model.parameters()).dtype
        with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
            output = self.called(x.to(dtype))
        return ((output.float() - y) ** 2).mean()

    def step(self, x, y, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.loss(x, y) * factor
        self.scaler.scale(loss).backward()
        grads = [p.grad.double() for p in self.model.parameters()]
        scale = self.scaler.get_scale()
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)) / scale)
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def bf16_autocast(**options):
    return Plain(autocast=torch.bfloat16, **options)


def fp16_autocast(**options):
    return Plain(autocast=torch.float16, scale=2.0**10, **options)


def bf16_model(**options):
    return Plain(net().bfloat16(), **options)


def fp16_model(make=sgd, **options):
    # In fp16, Adam's eps of 1e-8 is 0.
    return Plain(net().half(), sgd, **options)


LOOPS = [bf16_autocast, fp16_autocast, bf16_model, fp16_model, Plain]
EACH = pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)


def infinite(x):
    return torch.full_like(x, torch.inf)


# -- history ---------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["sgd", "fused"])
def test_history_records_scale_and_norm_of_unscaled_gradients(make, optimizer):
    loop = make(make=optimizer)
    with amp.debug.History(loop.optimizer, **loop.watched) as history:
        for x, y in batches(3):
            loop.step(x, y)
    assert [item.loss_scale for item in history.passes] == [loop.scaler.get_scale()] * 3
    assert [item.overflow for item in history.passes] == [False] * 3
    assert [item.grad_norm for item in history.passes] == pytest.approx(loop.norms, rel=1e-5)


@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["sgd", "fused"])
def test_history_marks_the_skips_of_a_grad_scaler(optimizer):
    loop = fp16_autocast(make=optimizer)
    history = amp.debug.History(loop.optimizer, scaler=loop.scaler)
    for x, y in batches(4, overflow_at={1}):
        loop.step(x, y)
    assert [item.overflow for item in history.passes] == [False, True, False, False]
    assert [item.loss_scale for item in history.passes] == [2.0**10, *[2.0**9] * 3]
    norms = [item.grad_norm for item in history.passes]
    assert not math.isfinite(norms.pop(1))
    del loop.norms[1]
    assert norms == pytest.approx(loop.norms, rel=1e-5)
    assert history.skipped == 1


@EACH
@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["sgd", "fused"])
def test_watching_changes_nothing(make, optimizer):
    results = []
    for watches in (False, True):
        loop = make(make=optimizer)
        if watches:
            history = amp.debug.History(loop.optimizer, **loop.watched)
            amp.debug.arm(loop.optimizer, **loop.watched)
        for x, y in batches(4, overflow_at={1} if loop.scaler.is_enabled() else ()):
            loop.step(x, y)
        results.append([*loop.model.parameters(), torch.tensor(loop.scaler.get_scale())])
    assert len(history.passes) == 4
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_after_stop_nothing_is_left_on_optimizer_and_scaler():
    loop = fp16_autocast()
    before = dict(vars(loop.scaler)), type(loop.scaler)
    first = amp.debug.History(loop.optimizer, scaler=loop.scaler)
    second = amp.debug.History(loop.optimizer)
    third = amp.debug.arm(loop.optimizer, **loop.watched)
    assert type(loop.scaler) is before[1]
    for _ in range(2):
        first.stop()
        second.stop()
        third.disarm()
    assert (vars(loop.scaler), type(loop.scaler)) == before
    assert not loop.optimizer._optimizer_step_post_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
    loop.step(*batch())
    assert first.passes == second.passes == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_watched_grad_scaler_is_copied_and_pickled_as_a_plain_one(duplicate):
    loop = fp16_autocast()
    history = amp.debug.History(loop.optimizer, scaler=loop.scaler)
    loop.step(*batch())
    found = duplicate(loop.scaler)
    assert type(found) is torch.amp.GradScaler
    assert found.state_dict() == loop.scaler.state_dict()
    loop.scaler = found
    loop.step(*batch())
    assert len(history.passes) == 1


def test_a_grad_scaler_of_ones_own_class_keeps_its_methods():
    class Mine(torch.amp.GradScaler):
        updates = 0

        def update(self, new_scale=None):
            self.updates += 1
            super().update(new_scale)

    loop = fp16_autocast()
    loop.scaler = Mine("cpu", init_scale=4.0)
    history = amp.debug.History(loop.optimizer, scaler=loop.scaler)
    loop.step(*batch())
    assert (loop.scaler.updates, len(history.passes)) == (1, 1)
    assert type(loop.scaler) is Mine


def test_a_history_made_before_initialize_says_so():
    model = net()
    optimizer = sgd(model.parameters())
    history = amp.debug.History(optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    with amp.scale_loss(model(batch()[0]).sum(), optimizer) as loss:
        loss.backward()
    with pytest.warns(UserWarning, match=r"after amp\.initialize"):
        optimizer.step()
    optimizer.step()
    assert history.passes == []


# -- wrappers --------------------------------------------------------------------------------


class Accelerated(torch.optim.Optimizer):
    """What accelerate makes of an optimizer: one inside, and no state of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_wrapped_optimizers_are_watched_inside():
    loop = bf16_autocast()
    history = amp.debug.History(Accelerated(loop.optimizer))
    with_scaler = fp16_autocast()
    scaled = amp.debug.History(Accelerated(with_scaler.optimizer), scaler=with_scaler.scaler)
    for each in (loop, with_scaler):
        each.step(*batch())
    assert (len(history.passes), len(scaled.passes)) == (1, 1)


# -- traces ----------------------------------------------------------------------------------


def test_a_gradient_too_large_for_its_scale_is_no_fault_of_the_model():
    loop = Plain(autocast=torch.float16, scale=2.0**24)
    with amp.debug.trace_overflow(loop.model, scaler=loop.scaler) as trace:
        loop.step(*batch())
    assert (trace.first.cause, trace.first.direction) == ("loss scale", "backward")
    assert "GradScaler" in trace.first.remedy
    assert "O4" not in trace.first.remedy


def first_fault(loop, x):
    nn.init.constant_(loop.model[0].weight, 100.0)
    with amp.debug.trace_overflow(loop.model, scaler=loop.scaler) as trace:
        loop.step(x, torch.zeros(3, 2))
    return trace.first


@pytest.mark.parametrize(
    ("make", "remedies"),
    [
        (fp16_autocast, ["torch.autocast(device_type, enabled=False)", "dtype=torch.bfloat16"]),
        (fp16_model, ["get_submodule('0').float()", "model.bfloat16()"]),
    ],
)
def test_remedies_are_those_of_the_loop(make, remedies):
    fault = first_fault(make(), torch.full((3, 4), 6e4))
    assert (fault.module, fault.op, fault.cause) == ("0", "aten.addmm", "range")
    assert all(remedy in fault.remedy for remedy in remedies)
    assert "amp." not in fault.remedy
    assert "O1" not in fault.remedy


# -- arm -------------------------------------------------------------------------------------


def tracing():
    return _get_current_dispatch_mode() is not None


@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["sgd", "fused"])
@pytest.mark.parametrize("clip", [False, True])
def test_arm_traces_after_skips_of_a_grad_scaler(log, optimizer, clip):
    loop = fp16_autocast(make=optimizer, clip=clip)
    nn.init.constant_(loop.model[0].weight, 100.0)
    handle = amp.debug.arm(loop.optimizer, 2, **loop.watched)
    large, y = torch.full((3, 4), 6e4), torch.zeros(3, 2)
    loop.step(large, y)
    loop.step(*batch(), factor=2.0**-20)
    for _ in range(2):
        assert not tracing()
        loop.step(large, y)
    assert tracing()
    loop.step(large, y)
    assert not tracing()
    (message,) = log()
    assert message.startswith(
        "2 or more consecutive steps were skipped. First overflow: aten.addmm"
    )
    assert handle.trace.first.module == "0"


def test_the_skips_by_which_a_grad_scaler_finds_its_scale_are_silent(log):
    loop = Plain(autocast=torch.float16, scale=2.0**24)
    handle = amp.debug.arm(loop.optimizer, 2, **loop.watched)
    causes = set()
    for _ in range(14):
        loop.step(*batch())
        first = None if handle.trace is None else handle.trace.first
        causes.add(None if first is None else first.cause)
    assert causes == {None, "loss scale"}
    assert log() == []
    assert not tracing()


@pytest.mark.parametrize("make", [bf16_autocast, bf16_model, fp16_model, Plain])
def test_arm_names_the_first_gradients_that_are_not_finite(log, make):
    loop = make()
    amp.debug.arm(loop.optimizer, **loop.watched)
    data = list(batches(5))
    for index, (x, y) in enumerate(data):
        loop.step(infinite(x) if index == 2 else x, y)
    (message,) = log()
    assert message.startswith("Gradients are not finite since step 3 after amp.debug.arm: 0.weight")
    assert "earlier checkpoint" in message
    assert "amp.initialize" not in message
    assert not tracing()


# -- bad input -------------------------------------------------------------------------------


def test_what_cannot_be_watched_is_refused_before_anything_changes():
    loop = fp16_autocast()
    with pytest.raises(RuntimeError, match=r"arm\(optimizer, model=model\)"):
        amp.debug.arm(loop.optimizer, scaler=loop.scaler)
    for call in (amp.debug.History, lambda *a, **k: amp.debug.arm(*a, model=loop.model, **k)):
        with pytest.raises(TypeError, match=r"got int as the scaler.*GradScaler"):
            call(loop.optimizer, scaler=3)
    with pytest.raises(TypeError, match="got int as the scaler"):
        amp.debug.trace_overflow(loop.model, scaler=3)
    with pytest.raises(TypeError, match="got Linear instead of an optimizer"):
        amp.debug.History(nn.Linear(1, 1))
    assert type(loop.scaler) is torch.amp.GradScaler
    model, optimizer = (
        amp.initialize(net(), None, opt_level="O4", verbosity=0),
        sgd([nn.Parameter(torch.ones(1))]),
    )
    del model
    prepared = net()
    prepared, bound = amp.initialize(
        prepared, sgd(prepared.parameters()), opt_level="O4", verbosity=0
    )
    with pytest.raises(ValueError, match="a loss scale of its own"):
        amp.debug.History(bound, scaler=loop.scaler)
    with pytest.raises(ValueError, match="amp has not prepared"):
        amp.debug.History(bound, optimizer)


# -- single questions ------------------------------------------------------------------------


@EACH
def test_why_skipped_names_the_gradients_of_every_loop(make):
    loop = make()
    loop.step(*batch())
    assert amp.debug.why_skipped(loop.optimizer) == []
    x, y = batch()
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(x, y) + loop.model[2].bias[0].float() * torch.inf).backward()
    found = amp.debug.why_skipped(loop.optimizer, model=loop.model)
    assert [(item.name, item.inf) for item in found] == [("2.bias", 1)]
    (unnamed,) = amp.debug.why_skipped(loop.optimizer)
    assert unnamed.name == "parameter 3 of group 0"


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["sgd", "fused"])
def test_frozen_updates_knows_scaled_gradients(optimizer, unscales):
    weight = nn.Parameter(torch.tensor([1.0, 1e-3]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    step = torch.optim.SGD([weight], lr=1e-9) if optimizer is sgd else fused([weight])
    step.param_groups[0]["lr"] = 1e-9
    scaler.scale(weight.sum()).backward()
    if unscales:
        scaler.unscale_(step)
    with amp.debug.frozen_updates(step, scaler=scaler) as updates:
        scaler.step(step)
    assert (updates.frozen, updates.wanted) == (1, 2)  # scaled, SGD's step would move both


# -- devices ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("overflows", [False, True])
def test_on_a_device_a_fused_loop_waits_for_nothing(overflows):
    model = net().cuda()
    optimizer = fused(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    history = amp.debug.History(optimizer, model=model, scaler=scaler)
    handle = amp.debug.arm(optimizer, model=model, scaler=scaler)
    x, y = (part.cuda() for part in batch())

    def step(factor):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = ((model(x).float() - y) ** 2).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(torch.inf if overflows else 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [item.overflow for item in history.passes] == [False, overflows]
    assert history.passes[1].loss_scale == (2.0**9 if overflows else 2.0**10)
    handle.disarm()
