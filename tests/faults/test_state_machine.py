"""Any order of amp's calls, with overflows and exceptions among them, keeps what amp promises."""

import copy
import os
import sys
import threading
from contextlib import contextmanager

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from apex import amp
from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.region import CastRegion, _threads
from apex._engine.optimizer.optimizer_class import binding_of
from tests.faults.memory import live_sessions
from tests.reference.loops import LEVELS, next_scale
from tests.training import cases

INTERVAL, LEAST, GREATEST = 3, 2.0**14, 2.0**17
OPTIMIZERS = ("SGD", "fused AdamW", "Adam", "fused SGD")
LEVEL_NAMES = sorted(LEVELS)
CASTING = ("O1", "O4")
BAD = {"inf": torch.inf, "NaN": torch.nan}


class Net(nn.Module):
    """``late`` is frozen and in no optimizer until a rule adds its group."""

    def __init__(self):
        super().__init__()
        self.body = cases.net()
        self.late = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.late(self.body(x))


class Fault(Exception):
    """Raised by a rule somewhere inside."""


class Training(RuleBasedStateMachine):
    """One model and its optimizer through any calls; ``scale`` and ``clean`` are the prediction."""

    def __init__(self):
        super().__init__()
        end_sessions()
        self.level = None
        self.saved = None
        self.groups_at_save = 0

    @initialize(name=st.sampled_from(OPTIMIZERS), seed=st.integers(0, 5))
    def make(self, name, seed):
        self.adam = "Adam" in name
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = cases.OPTIMIZERS[name](self.model.body.parameters())
        self.kinds = type(self.model), type(self.optimizer)
        self.forget()

    def forget(self):
        """No gradient is there, and no overflow waits for a step."""
        self.pending = self.poisoned = self.fresh = self.delayed = False

    # -- what is predicted -------------------------------------------------------------------

    @property
    def prepared(self):
        return self.level is not None

    @property
    def with_masters(self):
        return self.prepared and LEVELS[self.level].masters

    def ends_pass(self, *, overflow):
        if self.dynamic:
            self.pending |= overflow
            self.scale, self.clean = next_scale(
                self.scale,
                self.clean,
                overflow=overflow,
                interval=INTERVAL,
                least=LEAST,
                greatest=GREATEST,
            )
        else:
            self.clean += 1
        self.poisoned |= overflow
        self.fresh = True

    # -- calls -------------------------------------------------------------------------------

    @precondition(lambda self: not self.prepared)
    @rule(level=st.sampled_from(LEVEL_NAMES), loss_scale=st.sampled_from([None, "dynamic", 8.0]))
    def prepare(self, level, loss_scale):
        # Adam divides by zero in fp16: its epsilon and small squares round to 0.
        level = "O5" if level == "O3" and self.adam else level
        options = {"loss_scale": loss_scale, "growth_interval": INTERVAL, "verbosity": 0}
        options |= {"min_loss_scale": LEAST, "max_loss_scale": GREATEST}
        result = amp.initialize(self.model, self.optimizer, opt_level=level, **options)
        assert result[0] is self.model
        assert result[1] is self.optimizer
        self.level = level
        chosen = LEVELS[level].scale if loss_scale is None else loss_scale
        self.dynamic = chosen == "dynamic"
        self.scale, self.clean = 2.0**16 if self.dynamic else chosen, 0
        self.saved = None

    @precondition(lambda self: self.prepared)
    @rule(training=st.booleans())
    def forward(self, training):
        self.model.train(training)
        with torch.no_grad():
            out = self.model(cases.batch()[0])
        self.model.train()
        low = LEVELS[self.level].compute if self.level in CASTING else torch.float32
        assert out.dtype is low
        assert out.isfinite().all()

    def loss(self, seed, factor=1.0):
        # Small, so that nothing overflows that is not meant to.
        return cases.loss_of(self.model, *cases.batch(seed)) * (0.01 * factor)

    @precondition(lambda self: self.prepared)
    @rule(seed=st.integers(1, 5), bad=st.sampled_from([None, None, "inf", "NaN"]))
    def backward(self, seed, bad):
        loss = self.loss(seed, BAD.get(bad, 1.0))
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            assert not torch.is_autocast_enabled("cpu")
            scaled_loss.backward()
        self.delayed = False
        self.ends_pass(overflow=bad is not None)

    @precondition(lambda self: self.prepared)
    @rule(seed=st.integers(1, 5))
    def delayed_backward(self, seed):
        with amp.scale_loss(self.loss(seed), self.optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        self.delayed = True

    # A static scale lets inf through, and after a skipped step only zero_grad takes it away.
    @precondition(lambda self: self.prepared and not self.delayed)
    @precondition(lambda self: not self.poisoned or self.pending)
    @rule()
    def step(self):
        before = cases.masters(self.optimizer)
        self.optimizer.step()
        after = cases.masters(self.optimizer)
        if self.pending:
            assert cases.same(before, after) or not alike(before, after)
        elif self.fresh:
            assert not cases.same(before, after)
        self.pending = False
        if self.with_masters:
            self.fresh = self.poisoned = False

    @precondition(lambda self: self.prepared and not self.delayed)
    @rule(owner=st.sampled_from(["optimizer", "model"]), set_to_none=st.booleans())
    def zero_grad(self, owner, set_to_none):
        getattr(self, owner).zero_grad(set_to_none=set_to_none)
        pending = self.pending
        self.forget()
        # A model knows nothing of the step that is to be skipped, but for masters without gradient.
        self.pending = pending and owner == "model" and not (self.with_masters and set_to_none)

    @precondition(lambda self: self.prepared and not self.delayed and not self.poisoned)
    @precondition(lambda self: not any(p.requires_grad for p in self.model.late.parameters()))
    @precondition(lambda self: len(self.optimizer.param_groups) == 1)
    @rule()
    def add_group(self):
        self.model.late.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model.late.parameters())})

    @precondition(lambda self: not self.delayed)
    @rule(frozen=st.booleans())
    def freeze(self, frozen):
        self.model.body[0].weight.requires_grad_(not frozen)

    @precondition(lambda self: self.prepared and not self.delayed and not self.poisoned)
    @rule()
    def save(self):
        states = [each.state_dict() for each in (self.model, self.optimizer, amp)]
        self.groups_at_save = len(self.optimizer.param_groups)
        self.saved = (
            copy.deepcopy(states),
            cases.masters(self.optimizer),
            (self.scale, self.clean),
        )

    @precondition(lambda self: self.saved is not None and not self.delayed)
    @precondition(lambda self: self.groups_at_save in (0, len(self.optimizer.param_groups)))
    @rule(order=st.permutations([0, 1, 2]))
    def load(self, order):
        states, masters, (self.scale, self.clean) = self.saved
        for index in order:
            (self.model, self.optimizer, amp)[index].load_state_dict(copy.deepcopy(states[index]))
        now = cases.masters(self.optimizer)
        assert cases.same(now, masters) or not alike(now, masters)
        self.optimizer.zero_grad()
        self.forget()

    @precondition(lambda self: self.prepared and not self.delayed)
    @rule()
    def copies(self):
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        x, _ = cases.batch()
        with torch.no_grad():
            assert cases.same(model(x), self.model(x))
        assert cases.same(cases.masters(optimizer), cases.masters(self.optimizer))
        before = cases.values(self.model.parameters())
        with torch.no_grad():
            for param in (*model.parameters(), *amp.master_params(optimizer)):
                param.fill_(0.5)
        assert cases.same(cases.values(self.model.parameters()), before)

    @precondition(lambda self: self.prepared and not self.delayed)
    @rule()
    def restore(self):
        masters = cases.masters(self.optimizer)
        amp.restore(self.model, self.optimizer)
        assert (type(self.model), type(self.optimizer)) == self.kinds
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in stepped} <= {id(p) for p in self.model.parameters()}
        assert all(p.dtype is torch.float32 for p in self.model.parameters())
        if LEVELS[self.level].masters or LEVELS[self.level].stored is torch.float32:
            assert cases.same(cases.values(stepped), [master.float() for master in masters])
        self.level = self.saved = None
        self.optimizer.zero_grad()
        self.model.zero_grad()
        self.forget()

    # -- exceptions --------------------------------------------------------------------------

    @precondition(lambda self: self.prepared and not self.delayed)
    @precondition(lambda self: not self.poisoned and not self.pending)
    @rule(
        place=st.sampled_from(["forward", "block", "after backward", "backward", "step"]),
        kind=st.sampled_from([Fault, KeyboardInterrupt]),
        seed=st.integers(1, 5),
    )
    def exception(self, place, kind, seed):
        params = list(amp.master_params(self.optimizer))
        grads, values = cases.grads(params), cases.values(params)
        # Gradients that were left in the model go to the masters when a pass begins.
        left = self.with_masters and any(grad is None for grad in grads)
        try:
            with raising(self.model, self.optimizer, place, kind):
                loss = self.loss(seed)
                with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    if place == "block":
                        raise kind
                    scaled_loss.backward()
                    if place == "after backward":
                        raise kind
                self.ends_pass(overflow=False)
                grads = cases.grads(amp.master_params(self.optimizer))
                params = list(amp.master_params(self.optimizer))
                values = cases.values(params)
                self.optimizer.step()
        except kind:
            pass
        else:
            raise AssertionError("nothing was raised")
        # One that was just unfrozen has got a master in its place, at the beginning of the pass.
        now = list(amp.master_params(self.optimizer))
        same = list(map(id, now)) == list(map(id, params))
        assert not same or cases.same(cases.values(now), values)
        if self.in_place and "backward" in place:
            self.fresh = True
        else:
            assert not same or left or cases.same(cases.grads(now), grads)

    @property
    def in_place(self):
        """Whether autograd adds to the gradients themselves, at a scale of exactly 1."""
        return not self.dynamic and self.scale == 1.0 and not self.with_masters

    # -- what holds after every call ---------------------------------------------------------

    @invariant()
    def masters_round_to_the_model(self):
        if self.prepared:
            agree(self.optimizer)

    @invariant()
    def scale_is_the_predicted_one_within_bounds(self):
        if self.prepared and not self.delayed:
            (state,) = amp.state_dict().values()
            assert (state["loss_scale"], state["unskipped"]) == (self.scale, self.clean)
            assert not self.dynamic or LEAST <= self.scale <= GREATEST

    @invariant()
    def casts_are_on_where_they_belong(self):
        here = _threads.here
        assert (here.runs, here.off, here.busy) == (0, 0, 0)
        casts = self.level in CASTING
        assert torch.is_autocast_enabled("cpu") is casts
        assert product() is (LEVELS[self.level].compute if casts else torch.float32)
        found = []
        thread = threading.Thread(target=lambda: found.append(product()))
        thread.start()
        thread.join()
        assert found == [torch.float32]

    @invariant()
    def gradients_are_finite_unless_poisoned(self):
        if self.prepared and not self.poisoned:
            for grad in cases.grads(amp.master_params(self.optimizer)):
                assert grad is None or grad.isfinite().all()
        for param in self.model.parameters():
            assert param.isfinite().all()

    @invariant()
    def a_plain_model_has_nothing_of_amp(self):
        if not self.prepared:
            assert live(self.model, self.optimizer) == []
            assert amp.state_dict() == {}

    def teardown(self):
        self.model = self.optimizer = self.saved = None
        if sys.exc_info()[0] is None:
            assert live_sessions() == 0
            assert not torch.is_autocast_enabled("cpu")


def end_sessions():
    """Ends what the traceback of a failed example keeps alive."""
    for session in amp._amp_state.sessions():
        session.stop()
        amp._amp_state.discard(session)


def agree(optimizer):
    for pair in binding_of(optimizer).pairs:
        assert cases.same(pair.model.detach(), pair.master.detach().to(pair.model.dtype))


def alike(first, second):
    """Whether both are masters: a parameter that was unfrozen in between has got one since."""
    return [value.dtype for value in first] == [value.dtype for value in second]


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def live(model, optimizer):
    """Returns what amp left: attributes, hooks, overridden methods."""
    left = [name for each in (model, optimizer) for name in vars(each) if "apex" in name]
    for module in model.modules():
        left += [name for name, v in vars(module).items() if name.endswith("_hooks") and v]
        left += [name for name in ("forward", "zero_grad", "state_dict") if name in vars(module)]
    return left + [name for name in ("step", "zero_grad") if name in vars(optimizer)]


@contextmanager
def raising(model, optimizer, place, kind):
    """Raises ``kind`` in the last layer's forward, in the middle of backward, or before a step."""

    def fail(*args):
        raise kind

    def fail_in_backward(module, args, output):
        if output.requires_grad:
            output.register_hook(fail)

    if place == "forward":
        handle = model.late.register_forward_pre_hook(fail)
    elif place == "backward":
        # Between the layers: the second one's gradients are there by then.
        handle = model.body[1].register_forward_hook(fail_in_backward)
    else:
        handle = optimizer.register_step_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture
def kernels_stay():
    """Registering the kernels anew for each session would take most of the time."""
    keep = CastRegion(CastSpec(torch.bfloat16, ("cpu",), OpTable.default()))
    yield
    del keep


def test_any_order_of_calls_keeps_what_amp_promises(kernels_stay):
    settings = hypothesis.settings(
        max_examples=int(os.environ.get("APEX_EXAMPLES", "40")),
        stateful_step_count=40,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize="APEX_EXAMPLES" not in os.environ,
    )
    run_state_machine_as_test(Training, settings=settings)
