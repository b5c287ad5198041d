"""Any order of amp's calls, with overflows and exceptions among them, keeps what amp promises."""

import copy
import os
import pickle
from contextlib import contextmanager

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from apex import amp
from apex._engine.optimizer import one_pass
from apex._torch import blocks
from tests.faults.gradient_rules import GRADIENT_CALLS, GradientRules
from tests.faults.machine import (
    BOTH,
    GREATEST,
    INTERVAL,
    LATE,
    LEAST,
    LOSSES,
    MAKERS,
    PAIRS,
    PARTS,
    SEEDS,
)
from tests.faults.shadow import Shadow
from tests.faults.weight_rules import WRITES, WeightRules
from tests.support.reference.loops import LEVELS
from tests.training import cases

BAD = {"inf": torch.inf, "NaN": torch.nan}
COPIES = st.sampled_from([copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
ORDERS = st.sampled_from([("one",), ("two",), BOTH, ("two", "one")])
OTHERS = st.sampled_from([cases.sgd, MAKERS["fused SGD"]])
PASSES = st.tuples(
    st.sampled_from(PARTS),
    SEEDS,
    st.sampled_from([None, None, None, "inf", "NaN"]),
    st.integers(0, LOSSES - 1),
)


class Fault(Exception):
    """Raised by a rule somewhere inside."""


class Training(WeightRules, GradientRules):
    """One model and its optimizers through any calls."""

    @initialize(names=st.sampled_from(PAIRS), seed=st.integers(0, 5))
    def begin(self, names, seed):
        self.make(names, seed)

    @precondition(lambda self: not self.prepared)
    @rule(level=st.sampled_from(sorted(LEVELS)), loss_scale=st.sampled_from([None, "dynamic", 8.0]))
    def prepare(self, level, loss_scale):
        # Adam divides by zero in fp16: its epsilon and small squares round to 0.
        level = "O5" if level == "O3" and self.adam else level
        before = {name: param.detach().clone() for name, param in self.stepped().items()}
        options = {"loss_scale": loss_scale, "growth_interval": INTERVAL, "verbosity": 0}
        options |= {"min_loss_scale": LEAST, "max_loss_scale": GREATEST, "num_losses": LOSSES}
        optimizers = list(self.optimizers.values())
        model, bound = amp.initialize(self.model, optimizers, opt_level=level, **options)
        assert model is self.model
        assert all(map(lambda one, other: one is other, bound, optimizers))
        self.level = level
        chosen = LEVELS[level].scale if loss_scale is None else loss_scale
        self.dynamic = chosen == "dynamic"
        self.scales = [(2.0**16 if self.dynamic else chosen, 0)] * LOSSES
        stepped = self.stepped()
        low = {name: param.dtype for name, param in self.model.named_parameters()}
        weights = {name: value.to(stepped[name].dtype) for name, value in before.items()}
        self.shadow = Shadow(low, weights)
        self.saved = None

    # -- passes and steps --------------------------------------------------------------------

    def loss(self, part, seed, factor=1.0):
        loss = self.model.loss(part, seed) * factor
        if part == "all":
            self.shows()
        return loss

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(one=PASSES)
    def backward(self, one):
        (part, which), seed, bad, loss_id = one
        self.backward_pass(self.loss(part, seed, BAD.get(bad, 1.0)), which, loss_id)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(
        passes=st.lists(PASSES, min_size=1, max_size=3),
        order=ORDERS | OTHERS,
        writes=WRITES,
        between=GRADIENT_CALLS,
    )
    def iteration(self, passes, order, writes, between):
        for write, which, index in writes:
            getattr(self, write)(which, index, "copy_")
        for one in passes:
            self.backward(one)
        for call, which, value in between:
            getattr(self, call)(which, value)
        if self.poisoned and not self.dynamic:
            return
        if isinstance(order, tuple):
            self.step(order)
        elif not self.awaits_masters():
            self.step_of_another(order)

    @precondition(lambda self: self.prepared)
    @rule(part=st.sampled_from(sorted({part for part, _ in PARTS})), seed=SEEDS)
    def delayed_backward(self, part, seed):
        self.backward_pass(self.loss(part, seed), BOTH, 0, delay=True)
        self.delayed = 0

    @precondition(lambda self: self.delayed is not None)
    @rule(part=st.sampled_from(sorted({part for part, _ in PARTS})), seed=SEEDS)
    def last_backward(self, part, seed):
        self.backward_pass(self.loss(part, seed), BOTH, self.delayed)
        self.delayed = None

    # A static scale lets inf through.
    @precondition(lambda self: self.prepared and self.delayed is None)
    @precondition(lambda self: not self.poisoned or self.dynamic)
    @rule(order=ORDERS)
    def step(self, order):
        for which in order:
            self.settles(which, steps=True)
            optimizer, stepped = self.optimizers[which], self.stepped(which)
            self.unfreezes(which)
            self.asks(which)
            if not self.flags[which]:
                assert not self.shadow.poisoned(stepped)
                self.shadow.step(self.makers[which], optimizer, stepped)
            optimizer.step()
            self.shadow.show(stepped)

    def step_of_another(self, make):
        """Another optimizer, which amp has not prepared, steps by the rules of both."""
        another = make(list(self.stepped("one").values()))
        for which in BOTH:
            self.settles(which, steps=True)
            self.asks(which)
        if not self.flagged:
            self.shadow.step(make, another, self.stepped("one"))
        another.step()
        self.shows()

    # -- late changes, files, copies ---------------------------------------------------------

    @precondition(lambda self: self.prepared and self.delayed is None)
    @precondition(lambda self: "late.bias" not in self.names["one"])
    @rule()
    def add_group(self):
        late = self.model.late.requires_grad_(True)
        self.optimizers["one"].add_param_group({"params": list(late.parameters())})
        self.names["one"] += LATE
        for name, param in self.stepped("one").items():
            if name in LATE:
                value = self.params()[name].detach()
                self.shadow.weights[name] = value.to(param.dtype, copy=True)
                self.shadow.low[name] = value.dtype
                self.shadow.sums[name] = None

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(frozen=st.booleans())
    def freeze(self, frozen):
        self.model.second.bias.requires_grad_(not frozen)

    def state_dicts(self):
        return [each.state_dict() for each in (self.model, *self.optimizers.values(), amp)]

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule()
    def save(self):
        states = self.state_dicts()
        self.shows()
        weights = {name: self.shadow.merged(name) for name in self.shadow.weights}
        for name, weight in weights.items():
            assert cases.same(states[0][name], weight.float()), name
        assert all(value.dtype is torch.float32 for value in self.model.last.state_dict().values())
        self.saved = copy.deepcopy(states), weights, list(self.scales)

    @precondition(lambda self: self.delayed is None and self.saved_the_same_groups)
    @rule(order=st.permutations(range(4)))
    def load(self, order):
        states, weights, self.scales = self.saved
        self.scales = list(self.scales)
        targets = (self.model, *self.optimizers.values(), amp)
        for index in order:
            targets[index].load_state_dict(copy.deepcopy(states[index]))
        for name, weight in weights.items():
            self.shadow.write_both(name, weight)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(copied=COPIES)
    def copies(self, copied):
        model, *optimizers = copied((self.model, *self.optimizers.values()))
        self.shows()
        x, _ = cases.batch()
        self.model.eval()
        model.eval()
        with torch.no_grad():
            assert cases.same(model(x), self.model(x))
        self.model.train()
        for which, optimizer in zip(BOTH, optimizers, strict=True):
            expected = [self.shadow.merged(name) for name in self.names[which]]
            assert cases.same(cases.masters(optimizer), expected)
        before = cases.values(self.model.parameters())
        with torch.no_grad():
            for param in (
                *model.parameters(),
                *(p for each in optimizers for p in amp.master_params(each)),
            ):
                param.fill_(0.5)
        assert cases.same(cases.values(self.model.parameters()), before)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(copied=COPIES, seed=SEEDS)
    def copies_train_alike(self, copied, seed):
        ends = []
        for _ in range(2):
            model, *optimizers = copied((self.model, *self.optimizers.values()))
            model.loss("all", seed).backward()
            for optimizer in optimizers:
                optimizer.step()
            ends.append([cases.masters(each) for each in optimizers])
        self.shows()
        assert cases.same(*ends)

    @precondition(lambda self: self.delayed is None and self.saved_the_same_groups)
    @rule(order=st.permutations(range(4)), one=PASSES)
    def resume_twice(self, order, one):
        ends = []
        for _ in range(2):
            self.load(order)
            self.zero_grad("model", set_to_none=True)
            self.iteration([one], BOTH, [], [])
            ends.append([self.masters(which) for which in BOTH])
        assert cases.same(*ends)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule()
    def restore(self):
        expected = {name: self.shadow.merged(name).float() for name in self.shadow.weights}
        expected |= {name: self.shadow.weights[name] for name in self.shadow.unseen}
        amp.restore(self.model, list(self.optimizers.values()))
        assert [type(each) for each in (self.model, *self.optimizers.values())] == self.kinds
        params = self.params()
        assert all(param is params[name] for name, param in self.stepped().items())
        for name, weight in expected.items():
            assert cases.same(params[name].detach(), weight), name
        assert all(param.dtype is torch.float32 for param in params.values())
        self.level = self.saved = self.shadow = None
        for each in (self.model, *self.optimizers.values()):
            each.zero_grad()
        self.forget()

    # -- exceptions --------------------------------------------------------------------------

    @precondition(lambda self: self.prepared and self.delayed is None)
    @precondition(lambda self: not self.poisoned and not self.flagged)
    @rule(
        place=st.sampled_from(["forward", "block", "after backward", "backward", "step"]),
        reached=st.sampled_from([("all", BOTH), ("norm", ("one",)), ("norm", ("two",))]),
        kind=st.sampled_from([Fault, KeyboardInterrupt]),
        seed=SEEDS,
    )
    def exception(self, place, reached, kind, seed):
        self.kind = kind
        part, which = reached
        if part != "all" and place in ("forward", "backward"):  # of the whole model
            place = "block"
        one = self.optimizers["one"]
        # The invariants see that weights and gradients are those from before, or the pass's.
        try:
            with raising(self.model, one, place, kind):
                if part == "all":
                    self.shows()
                self.backward_pass(self.loss(part, seed), which, 0, after=place)
                self.settles("one", steps=True)
                one.step()
        except kind:
            self.shadow.adopt(self.stepped())
            if place == "step":
                self.shadow.show(self.names["one"])
        else:
            assert self.flagged, "nothing was raised"


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
        # Between the layers: those of the last ones are there by then.
        handle = model.norm.register_forward_hook(fail_in_backward)
    else:
        handle = optimizer.register_step_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


# The machine makes every mistake that amp warns of.
@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.filterwarnings("ignore:optimizer.step.. got the gradients of a plain")
@pytest.mark.filterwarnings("ignore:A backward pass inside amp.scale_loss did not start")
@pytest.mark.filterwarnings("ignore:Gradients were changed inside amp.scale_loss")
@pytest.mark.usefixtures("kernels_stay")
def test_any_order_of_calls_keeps_what_amp_promises(monkeypatch):
    # Steps take one pass where they can, in several blocks.
    monkeypatch.setattr(one_pass, "least_elements", 1)
    monkeypatch.setattr(blocks, "_LEAST", 16)
    settings = hypothesis.settings(
        max_examples=int(os.environ.get("APEX_EXAMPLES", "50")),
        stateful_step_count=40,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize="APEX_EXAMPLES" not in os.environ,
    )
    run_state_machine_as_test(Training, settings=settings)
