"""One model, two optimizers that share weights, and what is predicted of them."""

import sys
import threading
from contextlib import ExitStack

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant
from torch import nn

from apex import amp
from tests.faults.memory import live_sessions
from tests.faults.shadow import peek, recording
from tests.support.reference.loops import LEVELS, next_scale
from tests.training import cases

INTERVAL, LEAST, GREATEST = 3, 2.0**14, 2.0**17
LOSSES = 2
CASTING = ("O1", "O4")
BOTH = ("one", "two")
WHICH, INDEX, SEEDS = st.sampled_from(BOTH), st.integers(0, 4), st.integers(1, 5)
PAIRS = [
    ("SGD", "fused AdamW"),
    ("Adam", "fused SGD"),
    ("SGD", "fused SGD"),
    ("fused AdamW", "fused SGD"),
]
MAKERS = {
    **cases.OPTIMIZERS,
    # torch's refuses momentum where parameters get their first gradients at different steps.
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
}

STEPPED = {
    "one": ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.bias"],
    "two": ["last.weight", "last.bias", "first.weight", "norm.weight"],
}
LATE = ["late.weight", "late.bias"]

# What a loss reaches, and the optimizers that it may be for.
PARTS = [
    ("all", BOTH),
    ("all", ("two", "one")),
    ("norm", ("one",)),
    ("norm", ("two",)),
    ("norm", BOTH),
    ("last", ("two",)),
    ("last", BOTH),
    ("second", ("one",)),
    ("nothing", ("one",)),
    ("nothing", BOTH),
]


class Net(nn.Module):
    """A tied weight and a norm layer, which stays fp32 at O2 and O5.

    ``late`` is frozen and in no optimizer until a rule adds its group.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.late = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.late(self.last(self.second(torch.relu(self.norm(self.first(x))))))

    def loss(self, part, seed):
        """Small, so that hardly anything overflows that is not meant to."""
        if part == "all":
            return cases.loss_of(self, *cases.batch(seed)) * 0.01
        penalized = {
            "norm": self.norm.weight,
            "last": self.last.weight,
            "second": self.second.bias,
            "nothing": torch.zeros(2),
        }[part].float()
        # Something needs a gradient in any case.
        anchor = torch.ones(1, requires_grad=True)
        return ((penalized - seed) * anchor).square().sum() * 0.01


class Machine(RuleBasedStateMachine):
    """The state of a training, predictions of it, and what holds after every call."""

    def __init__(self):
        super().__init__()
        end_sessions()
        self.level = self.saved = self.shadow = None
        self.two_passes = ExitStack()  # entered while steps take two

    def make(self, names, seed):
        self.makers = dict(zip(BOTH, (MAKERS[name] for name in names), strict=True))
        self.adam = any("Adam" in name for name in names)
        torch.manual_seed(seed)
        self.model = Net()
        self.names = {which: list(STEPPED[which]) for which in BOTH}
        params = self.params()
        self.optimizers = {
            which: self.makers[which]([params[name] for name in self.names[which]])
            for which in BOTH
        }
        self.kinds = [type(each) for each in (self.model, *self.optimizers.values())]
        self.forget()

    def forget(self):
        """No gradient is there, and no overflow waits for a step."""
        self.flags = dict.fromkeys(BOTH, False)
        self.stale = set()  # optimizers that have not seen what became of their model's gradients
        self.unlike = set()  # names of model gradients that do not follow their masters'
        self.delayed = None  # the loss whose scaled gradients wait for a pass

    # -- what is predicted -------------------------------------------------------------------

    @property
    def prepared(self):
        return self.level is not None

    @property
    def flagged(self):
        return any(self.flags.values())

    @property
    def poisoned(self):
        return self.prepared and self.shadow.poisoned(self.shadow.sums)

    @property
    def saved_the_same_groups(self):
        return self.saved is not None and self.saved[1].keys() == self.shadow.weights.keys()

    @property
    def in_place(self):
        """Names whose gradients autograd adds up itself, at a scale of exactly 1."""
        identity = not self.dynamic and self.scales[0][0] == 1.0
        params = self.params()
        own = {name for name, param in self.stepped().items() if param is params[name]}
        return own if identity else set()

    def params(self):
        return dict(self.model.named_parameters())

    def stepped(self, *which):
        """Returns what the optimizers step, by name, without any call of amp."""
        return {
            name: param
            for each in which or BOTH
            for name, param in zip(
                self.names[each],
                (p for group in self.optimizers[each].param_groups for p in group["params"]),
                strict=True,
            )
        }

    def settles(self, which, *, steps=False):
        """A step or clipping of an optimizer begins."""
        self.shadow.take(self.names[which], steps=steps)
        self.notices(which)

    def unfreezes(self, which):
        """Parameters that were unfrozen get their masters."""
        if LEVELS[self.level].masters:
            stepped = self.stepped(which).items()
            self.shadow.adopt({name: p.float() for name, p in stepped if p.requires_grad})

    def awaits_masters(self):
        """Whether a pass or step would give a parameter its master."""
        stepped = self.stepped().values()
        return any(param.requires_grad and param.dtype is not torch.float32 for param in stepped)

    def notices(self, which):
        """The optimizer looks at its gradients: none there, none poisoned."""
        self.stale.discard(which)
        if self.shadow.empty(self.names[which]):
            self.flags[which] = False

    def mirrors(self, which):
        """The model's gradients are set anew."""
        self.unlike -= set(self.names[which])

    def shows(self):
        self.shadow.show(self.shadow.weights)

    def masters(self, which):
        self.shadow.take(self.names[which])
        self.notices(which)
        return cases.masters(self.optimizers[which])

    def asks(self, which):
        """Where the other optimizer's overflow is gone, amp may know it or not."""
        if self.flags[which] is True and not self.poisoned:
            overflow = self.optimizers[which]._apex_binding.gradients.overflow
            self.flags[which] = overflow.checked and bool(overflow.found_inf)

    def ends_pass(self, loss_id):
        scale, clean = self.scales[loss_id]
        overflow = self.shadow.unscale(scale)
        if self.dynamic:
            # Both share weights: one poisoned gradient is a reason for either to skip.
            self.flags = {which: flag or overflow for which, flag in self.flags.items()}
            bounds = {"interval": INTERVAL, "least": LEAST, "greatest": GREATEST}
            self.scales[loss_id] = next_scale(scale, clean, overflow=overflow, **bounds)
        else:
            self.scales[loss_id] = scale, clean + 1

    def backward_pass(self, loss, which, loss_id, *, delay=False, after=None):
        """A ``scale_loss`` block, here and in the shadow."""
        order = [self.optimizers[each] for each in which]
        block = amp.scale_loss(loss, order, loss_id=loss_id, delay_unscale=delay)
        raw = {}
        in_place = self.in_place
        try:
            with recording(self.model, raw), block as scaled:
                for each in which:
                    self.shadow.take(self.names[each])
                    self.notices(each)
                    self.mirrors(each)
                    self.asks(each)
                # Unfrozen ones have got their masters as the pass began.
                self.shadow.adopt(self.stepped(*which))
                in_place = self.in_place
                assert torch.is_autocast_enabled("cpu") is (self.level in CASTING)
                if after == "block":
                    raise self.kind
                scaled.backward()
                if after == "after backward":
                    raise self.kind
        except BaseException:
            self.shadow.scaled = {}
            raise
        finally:
            self.shadow.add_in_place(raw, in_place)
        self.shadow.add_scaled({k: v for k, v in raw.items() if k not in in_place})
        if not delay:
            self.ends_pass(loss_id)

    # -- what holds after every call ---------------------------------------------------------

    @invariant()
    def weights_are_the_expected_ones_to_the_last_bit(self):
        if not self.prepared:
            return
        params = self.params()
        for name, param in self.stepped().items():
            expected = self.shadow.weights[name]
            assert cases.same(param.detach(), expected), name
            model = params[name].detach()
            if name in self.shadow.written:
                assert cases.same(model, self.shadow.written[name]), name
            elif name not in self.shadow.unseen:
                assert cases.same(model, self.shadow.shown(name)), name
        for param in params.values():
            assert param.isfinite().all()

    @invariant()
    def gradients_are_the_expected_sums_to_the_last_bit(self):
        if self.prepared and self.delayed is None:
            for which in set(BOTH) - self.stale:
                for name, param in self.stepped(which).items():
                    assert cases.same(peek(param), self.shadow.sums[name]), name

    @invariant()
    def scales_are_the_predicted_ones_within_bounds(self):
        if self.prepared:
            states = amp.state_dict().values()
            assert [(each["loss_scale"], each["unskipped"]) for each in states] == self.scales
            assert not self.dynamic or all(LEAST <= s <= GREATEST for s, _ in self.scales)

    @invariant()
    def casts_are_on_where_they_belong(self):
        casts = self.level in CASTING
        assert torch.is_autocast_enabled("cpu") is casts
        assert product() is (LEVELS[self.level].compute if casts else torch.float32)
        found = []
        thread = threading.Thread(target=lambda: found.append(product()))
        thread.start()
        thread.join()
        assert found == [torch.float32]

    @invariant()
    def a_plain_model_has_nothing_of_amp(self):
        if not self.prepared:
            assert left_behind(self.model, *self.optimizers.values()) == []
            assert amp.state_dict() == {}

    def teardown(self):
        self.two_passes.close()
        self.model = self.optimizers = self.saved = None
        if sys.exc_info()[0] is None:
            assert live_sessions() == 0
            assert not torch.is_autocast_enabled("cpu")


def end_sessions():
    """Ends what the traceback of a failed example keeps alive."""
    for session in amp._amp_state.sessions():
        session.close()
        amp._amp_state.discard(session)


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def left_behind(model, *optimizers):
    """Returns what amp left: attributes, hooks, overridden methods."""
    left = [name for each in (model, *optimizers) for name in vars(each) if "apex" in name]
    for module in model.modules():
        left += [name for name, v in vars(module).items() if name.endswith("_hooks") and v]
        left += [name for name in ("forward", "zero_grad", "state_dict") if name in vars(module)]
    return left + [
        name for each in optimizers for name in ("step", "zero_grad") if name in vars(each)
    ]
