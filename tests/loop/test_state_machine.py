"""Random programs against a model of the rules; ``STRESS=1`` runs many more.

Weights, gradients and rates are few-bit numbers, so every level is exact.
"""

import math
import os
import random

import pytest
import torch

from apex import amp
from tests.support import loops

SEEDS = range(2000 if os.environ.get("STRESS") else 200)
RATE = 0.125
LEVELS = {
    "O0": {},
    "O1": {"loss_scale": "dynamic"},
    "O1 static": {"loss_scale": 8.0},
    "O2": {"loss_scale": "dynamic"},
    "O2 static": {"loss_scale": 8.0},
    "O4": {},
    "O5": {},
    "O5 dynamic": {"loss_scale": "dynamic"},
}
STEPPED = [["abc"], ["abc", "abc"], ["ab", "bc"], ["ab", "c"], ["ab", "bc", "c"], ["a", "bc", "c"]]
"""The weights of each optimizer; "d" comes later, in a group of its own."""


class Program:
    """A training, and what the rules say of it."""

    def __init__(self, level, choose):
        self.choose = choose
        self.model = loops.Weights("abcd")
        self.names = [set(names) for names in choose.choice(STEPPED)]
        params = [[*map(self.model.get_parameter, sorted(names))] for names in self.names]
        self.optimizers = [
            torch.optim.SGD(own, lr=RATE, fused=choose.choice([True, False])) for own in params
        ]
        options = {"num_losses": 2, "growth_interval": choose.choice([3, 2000]), **LEVELS[level]}
        amp.initialize(self.model, self.optimizers, opt_level=level[:2], verbosity=0, **options)
        self.dynamic = options.get("loss_scale") == "dynamic"
        if self.dynamic:
            for scaler, scale in zip(amp._amp_state.loss_scalers, (2.0**8, 2.0**4), strict=True):
                scaler._loss_scale = scale
        self.has_masters = level[:2] in loops.WITH_MASTERS
        self.scales = "loss_scale" in options
        self.params = {}  # what is stepped
        self.find_params()
        self.weights = dict.fromkeys("abc", 1.0)
        self.masters = dict(self.weights) if self.has_masters else self.weights
        self.grads = {}
        self.flags = [False] * len(self.optimizers)
        self.skipped = set()  # optimizers whose last step was
        self.others = {}  # of an optimizer: whether its gradients overflowed in blocks of others
        self.delayed = {}  # of an optimizer: those whose gradients its delayed pass is to check
        self.given = {}  # of an optimizer: those that its delayed block was given
        self.master_written = self.weight_written = False

    # -- of the model of the rules -------------------------------------------------------------

    def find_params(self):
        for names, optimizer in zip(self.names, self.optimizers, strict=True):
            stepped = [param for group in optimizer.param_groups for param in group["params"]]
            self.params.update(zip(sorted(names), stepped, strict=True))

    def sharing(self, given):
        """The optimizers that a pass of some is for."""
        found = list(given)
        for index in found:
            for other, names in enumerate(self.names):
                if other not in found and names & self.names[index]:
                    found.append(other)
        return found

    def forget(self, names):
        """What was cleared has no gradient, and is in no delayed pass."""
        for name in names:
            self.grads.pop(name, None)
        for index, own in enumerate(self.names):
            if own <= set(names):
                self.replace_delayed([index])
                self.others.pop(index, None)

    def replace_delayed(self, indices):
        for index in indices:
            self.delayed.pop(index, set()).discard(index)

    def forward(self):
        if self.master_written and self.has_masters:
            self.weights = dict(self.masters)
        self.master_written = self.weight_written = False

    # -- calls ---------------------------------------------------------------------------------

    def number(self):
        return self.choose.randint(-16, 16) * RATE

    def index(self):
        return self.choose.randrange(len(self.optimizers))

    def block(self, fails=False):
        count, loss_id = len(self.optimizers), self.choose.randint(0, 1)
        given = self.choose.sample(range(count), self.choose.randint(1, count))
        sharing = self.sharing(given)
        names = sorted(set().union(*(self.names[other] for other in sharing)))
        factors = {name: float(self.choose.randint(1, 2)) for name in names}
        if len(factors) > 1 and self.choose.random() < 0.3:
            del factors[self.choose.choice(names)]
        overflows = self.dynamic and not fails and self.choose.random() < 0.2
        if overflows:
            factors[self.choose.choice(list(factors))] = torch.inf
        delays = self.choose.random() < 0.3 and not overflows
        lenders = [*range(count)] if self.scales else []
        lenders = [other for other in lenders if other not in sharing]
        self.settle(given, takes=True)
        self.settle([*sharing, *lenders], takes=False)
        continues = self.continues(sharing)
        lent_in_place = self.continues(lenders)
        lent = self.lent_factors(names, overflows=self.dynamic and not fails)
        loss = self.model(**factors, **lent)
        if self.master_written:
            self.forward()
        optimizers = [self.optimizers[index] for index in given]
        try:
            with amp.scale_loss(loss, optimizers, loss_id, delay_unscale=delays) as scaled:
                if not fails and self.choose.random() < 0.2:
                    self.clear()
                scaled.backward()
                if fails:
                    raise KeyError
        except KeyError:
            if self.scales:
                factors = factors if continues else {}
                lent = lent if lent_in_place else {}
        for name, factor in (factors | lent).items():
            self.grads[name] = self.grads.get(name, 0.0) + factor
        self.replace_delayed(lenders)
        self.flag_lenders(lenders, lent, lent_in_place)
        if fails:
            return
        self.replace_delayed(sharing)
        if delays:
            members = {*sharing}
            self.delayed.update((other, members) for other in sharing)
            self.given.update((other, given) for other in sharing)
        else:
            self.flag(sharing, given, overflows or (continues and self.overflows(sharing)))
            if not continues:
                for other in self.skipped.intersection(given):
                    self.check_sum(other)

    def flag(self, indices, given, overflows):
        """An overflow skips the steps of optimizers that a block was given; see ``settle``."""
        for index in indices:
            if index in given:
                self.flags[index] |= overflows
            else:
                self.others[index] = overflows or self.others.get(index, False)

    def flag_lenders(self, lenders, lent, in_place):
        """An overflow in lent gradients is that of all lenders which share some of them."""
        for index in lenders if self.dynamic else ():
            sharing = [other for other in self.sharing([index]) if other in lenders]
            names = set().union(*(self.names[other] for other in sharing))
            factors = self.grads if in_place else lent
            found = [factors[name] for name in names & factors.keys()]
            if found:
                self.flag([index], [], not all(map(math.isfinite, found)))

    def settle(self, indices, takes):
        """What blocks of others have found is over once cleared, and an optimizer's own if not."""
        for index in self.others.keys() & indices:
            has_grads = not self.grads.keys().isdisjoint(self.names[index])
            if has_grads and takes:
                if index in self.skipped:
                    self.check_sum(index)
                self.flags[index] |= self.others[index]
            if takes or not has_grads:
                del self.others[index]

    def continues(self, indices):
        """Whether a pass adds in place to what delayed ones have left of some optimizers."""
        left = [self.names[index] for index in indices if index in self.delayed]
        return any(not self.grads.keys().isdisjoint(names) for names in left)

    def overflows(self, indices):
        """Whether gradients of optimizers are inf or NaN, which a static scale does not check."""
        names = set().union(*(self.names[index] for index in indices))
        is_finite = all(math.isfinite(self.grads.get(name, 0.0)) for name in names)
        return self.dynamic and not is_finite

    def check_sum(self, index):
        """Checks what a skipped step may have left."""
        self.flags[index] |= self.overflows([index])

    def lent_factors(self, own, *, overflows):
        """Factors of weights of other optimizers, which the pass reaches, too."""
        lent = {}
        if self.choose.random() < 0.3:
            for names in self.names:
                if names.isdisjoint(own):
                    lent.update(dict.fromkeys(sorted(names), 1.0))
        if lent and overflows and self.choose.random() < 0.3:
            lent[self.choose.choice(sorted(lent))] = torch.inf
        return lent

    def plain(self):
        """Passes without a block."""
        factors = {name: float(self.choose.randint(1, 2)) for name in self.params}
        loss = self.model(**factors)
        if self.master_written:
            self.forward()
        passes = self.choose.randint(1, 2)
        for _ in range(passes):
            loss.backward(retain_graph=True)
        for name, factor in factors.items():
            self.grads[name] = self.grads.get(name, 0.0) + passes * factor

    def edit(self):
        """Writes or replaces gradients, of the model or of what is stepped."""
        for name in self.names[self.index()]:
            param = self.choose.choice([getattr(self.model, name), self.params[name]])
            if name not in self.grads or param.grad is None:
                continue
            factor = self.choose.choice([-1.0, -1.0, 0.0])
            way = self.choose.choice(["in place", "data", "assigned"])
            if way == "in place":
                param.grad.mul_(factor)
            elif way == "data":
                param.grad.data.mul_(factor)
            else:
                param.grad = param.grad * factor
            self.grads[name] *= factor

    def clear_by_hand(self):
        index = self.index()
        for name in self.names[index]:
            self.choose.choice([getattr(self.model, name), self.params[name]]).grad = None
            self.grads.pop(name, None)  # in no call of amp: a delayed pass goes on

    def fail(self):
        self.block(fails=True)

    def step(self):
        index = self.index()
        self.optimizers[index].step()
        members = [*self.delayed.get(index, ())]
        if members:
            self.flag(members, self.given[index], self.overflows(members))
        self.settle([index], takes=True)
        self.check_sum(index)
        for other in members:
            del self.delayed[other]
        if self.weight_written and not self.master_written and self.has_masters:
            for name in self.names[index]:
                self.masters[name] = self.weights[name]
        for name in self.names[index]:
            if not self.flags[index]:
                self.masters[name] -= RATE * self.grads.get(name, 0.0)
            self.weights[name] = self.masters[name]
        assert amp.step_was_skipped(self.optimizers[index], on_host=True) is self.flags[index]
        self.skipped.discard(index)
        if self.flags[index]:
            self.skipped.add(index)
        self.flags[index] = False
        if len(self.optimizers) == 1:
            self.master_written = self.weight_written = False
        self.check()

    def clear(self):
        index, set_to_none = self.index(), self.choose.random() < 0.5
        if self.choose.random() < 0.5:
            self.optimizers[index].zero_grad(set_to_none=set_to_none)
            self.forget(self.names[index])
        else:
            self.model.zero_grad(set_to_none=set_to_none)
            self.forget("abcd")

    def discard(self):
        """Clips, and drops the clipped gradients as a script may."""
        index = self.index()
        if not all(map(math.isfinite, self.grads.values())):
            return
        amp.clip_grad_norm_(self.optimizers[index], 1e-3)
        for name in self.names[index]:
            for param in (getattr(self.model, name), self.params[name]):
                param.grad = None
            self.grads.pop(name, None)

    def add_group(self):
        if "d" in self.params:
            return
        index = self.index()
        self.optimizers[index].add_param_group({"params": [self.model.d]})
        self.params["d"] = self.optimizers[index].param_groups[-1]["params"][0]
        self.names[index].add("d")
        self.masters["d"] = self.weights["d"] = 1.0

    def write_masters(self):
        self.masters.update({name: self.number() for name in self.masters})
        values = [torch.full((2,), self.masters[name]) for name in self.params]
        way = self.choose.choice(["data", "copy_", "data.copy_"] if self.has_masters else ["copy_"])
        loops.change(self.params.values(), values, way)
        self.master_written = True

    def write_weights(self):
        self.model(a=0.0)
        if self.master_written:
            self.forward()
        self.weights.update({name: self.number() for name in self.weights})
        params = [getattr(self.model, name) for name in self.weights]
        values = [
            torch.full_like(param, value)
            for param, value in zip(params, self.weights.values(), strict=True)
        ]
        loops.change(params, values, self.choose.choice(["data", "copy_"]))
        self.weight_written = True
        if len(self.optimizers) > 1:  # brings the masters of all up to date, as their steps would
            for optimizer in self.optimizers:
                list(amp.master_params(optimizer))
            self.masters.update(self.weights)
            self.weight_written = False

    def swap(self):
        self.model(a=0.0)
        if self.master_written:
            self.forward()
        own = loops.values(self.model.parameters())
        loops.change(self.model.parameters(), [torch.zeros_like(p) for p in own], "copy_")
        self.model(a=1.0)
        loops.change(self.model.parameters(), own, self.choose.choice(["data", "copy_"]))

    def save(self):
        state = self.model.state_dict()
        if self.master_written:
            self.forward()
        saved = {name: state[name][0].item() for name in self.weights}
        assert repr(saved) == repr(self.weights)  # NaN is as NaN

    def check(self):
        if not self.master_written:
            found = {name: getattr(self.model, name)[0].item() for name in self.weights}
            assert repr(found) == repr(self.weights)
        found = {name: self.params[name][0].item() for name in self.masters}
        assert repr(found) == repr(self.masters)


CALLS = ["block"] * 6 + ["step"] * 4 + ["discard", "plain", "edit"] * 2 + ["clear", "write_masters"]
CALLS += ["write_weights", "swap", "save", "fail", "add_group", "clear_by_hand"]


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.filterwarnings("ignore:Gradients of a skipped step")
@pytest.mark.filterwarnings("ignore:An exception ended an amp.scale_loss block")
@pytest.mark.filterwarnings("ignore:optimizer.step.. got gradients that no amp.scale_loss block")
@pytest.mark.parametrize("level", LEVELS)
def test_random_programs_follow_the_rules(level):
    for seed in SEEDS:
        choose = random.Random(seed)
        program, done = Program(level, choose), []
        try:
            for _ in range(choose.randint(3, 14)):
                done.append(choose.choice(CALLS))
                getattr(program, done[-1])()
            program.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {program.names} {done}") from error
