"""Rules that read, clip or clear gradients between passes."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from apex import amp
from apex._engine.optimizer import one_pass
from tests.faults.machine import BOTH, INDEX, WHICH, Machine
from tests.support.two_pass import two_pass_steps
from tests.training import cases

READS = ["read_by_master_params", "read_in_a_group", "read_in_the_model"]
NORMS = st.sampled_from([1e-4, 1e-2, 100.0])
HALF = torch.tensor(0.5)
GRADIENT_CALLS = st.lists(
    st.tuples(st.just("clip"), WHICH, NORMS) | st.tuples(st.sampled_from(READS), WHICH, INDEX),
    max_size=2,
)


class GradientRules(Machine):
    """What a script does with gradients, none of which is a pass or a step."""

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(owner=st.sampled_from(["one", "two", "model"]), set_to_none=st.booleans())
    def zero_grad(self, owner, set_to_none):
        of = self.model if owner == "model" else self.optimizers[owner]
        of.zero_grad(set_to_none=set_to_none)
        cleared = BOTH if owner == "model" else (owner,)
        for which in cleared:
            self.shadow.zero(self.names[which], set_to_none=set_to_none)
            self.flags[which] = False
            self.mirrors(which)
            if set_to_none:
                self.stale.discard(which)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(looks=st.booleans())
    def clear_by_hand(self, looks):
        for param in self.model.parameters():
            param.grad = None
        self.shadow.zero(self.shadow.sums, set_to_none=True)
        self.stale = set(BOTH)
        if looks:
            for which in BOTH:
                assert all(p.grad is None for p in amp.master_params(self.optimizers[which]))
                self.shadow.take(self.names[which])
                self.notices(which)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(which=WHICH, max_norm=NORMS)
    def clip(self, which, max_norm):
        if self.poisoned and not all(self.flags.values()):
            return  # a NaN norm would spoil shared gradients that the other one steps
        self.settles(which)
        self.unfreezes(which)
        norm = amp.clip_grad_norm_(self.optimizers[which], max_norm)
        self.shadow.clip(self.names[which], norm, max_norm)
        self.mirrors(which)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @precondition(lambda self: not self.poisoned and not self.flagged)
    @rule(which=WHICH)
    def halve_in_the_optimizer(self, which):
        for param in amp.master_params(self.optimizers[which]):
            if param.grad is not None:
                param.grad.mul_(0.5)
        self.shadow.take(self.names[which])
        self.notices(which)
        self.shadow.multiply(self.names[which], HALF)
        self.unlike |= {name for name in self.names[which] if self.shadow.has_master(name)}

    # Halves of fp16 gradients may be subnormal, and are no halves then. Nor is there one factor
    # where an optimizer has seen one of two changes of a shared gradient.
    @precondition(lambda self: self.prepared and self.delayed is None)
    @precondition(lambda self: self.level != "O2" and not self.unlike and not self.stale)
    @precondition(lambda self: not self.poisoned and not self.flagged)
    @rule()
    def halve_in_the_model(self):
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        self.shadow.multiply(self.shadow.sums, HALF)
        self.stale = set(BOTH)

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(which=WHICH, index=INDEX)
    def read_by_master_params(self, which, index):
        params = list(amp.master_params(self.optimizers[which]))
        self.shadow.take(self.names[which])
        self.notices(which)
        index %= len(params)
        assert cases.same(params[index].grad, self.shadow.sums[self.names[which][index]])

    @precondition(lambda self: self.prepared)
    @rule(which=WHICH, index=INDEX)
    def read_in_a_group(self, which, index):
        stepped = self.stepped(which)
        name = self.names[which][index % len(stepped)]
        grad = stepped[name].grad
        if self.delayed is None and which not in self.stale:
            assert cases.same(grad, self.shadow.sums[name])

    @precondition(lambda self: self.prepared and self.delayed is None)
    @rule(which=WHICH, index=INDEX)
    def read_in_the_model(self, which, index):
        name = self.names[which][index % len(self.names[which])]
        grad, total = self.params()[name].grad, self.shadow.sums[name]
        if name not in self.unlike:
            assert cases.same(grad, None if total is None else total.to(grad.dtype))

    @rule()
    def change_the_number_of_passes_of_a_step(self):
        if one_pass.enabled:
            self.two_passes.enter_context(two_pass_steps())
        else:
            self.two_passes.close()
