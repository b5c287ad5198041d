"""Programs of every level and optimizer equal the same programs written by hand, bit for bit.

All scales are dynamic; one pass overflows. By hand, saving, copying and loading are nothing at all.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops
from tests.support.reference.plain_loops import Loop

NAMES = ("fused AdamW", "Adam", "SGD", "fused SGD", "RMSprop")
# torch's fused SGD keeps random numbers in an fp16 momentum on CPU, with or without amp (2.13).
PAIRS = [(level, name) for level in loops.LEVELS for name in NAMES]
PAIRS.remove(("O3", "fused SGD"))
OPTIONS = {"loss_scale": "dynamic", "growth_interval": 3, "max_loss_scale": 2.0**16}


class ByAmp:
    """A training through the public API, with what a program calls."""

    def __init__(self, level, name, trains=slice(None)):
        self.level, self.make = level, loops.OPTIMIZERS[name]
        self.model = loops.net()
        self.optimizer = self.make(list(self.model.parameters())[trains])
        self.prepare()

    def prepare(self):
        amp.initialize(self.model, self.optimizer, opt_level=self.level, verbosity=0, **OPTIONS)

    def backward(self, x, y, **options):
        loops.backward(self.model, self.optimizer, x, y, **options)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()

    @property
    def params(self):
        return list(self.model.parameters())

    @property
    def stepped(self):
        return list(amp.master_params(self.optimizer))

    def go_on(self, way):
        """Goes on with other objects, which ``way`` makes of these."""
        if way == "deepcopy":
            scales = amp.state_dict()
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
            self.prepare()
            amp.load_state_dict(scales)
            return
        parts = (self.model, self.optimizer, amp)
        saved = [pickle.loads(pickle.dumps(part.state_dict())) for part in parts]
        masters = loops.masters(self.optimizer)
        del parts, self.model, self.optimizer
        self.model = loops.net(seed=5)
        self.optimizer = self.make(self.model.parameters())
        early = way == "loaded before initialize"
        if not early:
            self.prepare()
        parts = list(zip((self.model, self.optimizer, amp), saved, strict=True))
        if way == "loaded in reverse":
            parts.reverse()
        for part, state in parts:
            if early and part is amp:  # which has no scale to load into before
                self.prepare()
            part.load_state_dict(state)
            if way == "loaded as in BERT" and part is self.optimizer:
                part._lazy_init_maybe_master_weights()
                part._amp_stash.lazy_init_called = True
                for param, master in zip(self.stepped, masters, strict=True):
                    param.data.copy_(master)


class ByHand(Loop):
    def __init__(self, level, name, trains=slice(None)):
        super().__init__(
            level, loops.net().parameters(), loops.OPTIMIZERS[name], scale="dynamic", interval=3,
            greatest=2.0**16, trains=trains,
        )  # fmt: skip

    @property
    def params(self):
        return self.model

    def go_on(self, way):
        """Goes on as it is."""


def data(side, count=4):
    """Batches, of which the second overflows; gradients are cleared before each."""
    for x, y in loops.batches(count, overflow_at={1}):
        side.zero_grad()
        yield x, y


def plain(side):
    for x, y in data(side):
        side.backward(x, y)
        side.step()


def accumulated(side):
    for first in data(side):
        for x, y in (first, *loops.batches(2, seed=2)):
            side.backward(x, y)
        side.step()


def delayed(side):
    for x, y in data(side):
        side.backward(x, y, delay_unscale=True)
        side.backward(*loops.batch(2))
        side.step()


def clipped(side):
    for x, y in data(side):
        side.backward(x, y)
        nn.utils.clip_grad_norm_(side.stepped, 0.1)
        side.step()


def frozen(side):
    for step, (x, y) in enumerate(data(side, 6)):
        for param in side.params[:2]:
            param.requires_grad_(step not in (2, 3))
        side.backward(x, y)
        side.step()


def scheduled(side):
    scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, 1, gamma=0.5)
    for x, y in data(side):
        side.backward(x, y)
        side.step()
        scheduler.step()


def gone_on(way):
    def program(side):
        plain(side)
        side.go_on(way)
        plain(side)

    program.__name__ = way
    return program


PROGRAMS = [
    plain, accumulated, delayed, clipped, frozen, scheduled, gone_on("deepcopy"),
    gone_on("loaded"), gone_on("loaded in reverse"), gone_on("loaded before initialize"),
    gone_on("loaded as in BERT"),
]  # fmt: skip


def assert_equal(ours, by_hand):
    assert loops.same(ours.params, by_hand.params)
    assert loops.same(ours.stepped, by_hand.stepped)
    states = [side.optimizer.state_dict()["state"] for side in (ours, by_hand)]
    assert loops.same(*states)
    assert loops.loss_scale() == by_hand.scale


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("level", "name"), PAIRS)
def test_a_program_equals_the_one_by_hand(level, name, program):
    ours, by_hand = ByAmp(level, name), ByHand(level, name)
    for side in (ours, by_hand):
        program(side)
    assert_equal(ours, by_hand)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("level", "name"), PAIRS)
def test_a_group_added_later_trains_as_by_hand(level, name, early):
    ours, by_hand = (kind(level, name, trains=slice(2)) for kind in (ByAmp, ByHand))
    for side in (ours, by_hand):
        if not early:
            plain(side)
            side.zero_grad()
        params = side.params if side is ours else side.stepped
        side.optimizer.add_param_group({"params": params[2:]})
        if not early and side is ours:
            side.model.zero_grad()
        plain(side)
    assert_equal(ours, by_hand)


@pytest.mark.parametrize(("level", "name"), PAIRS)
def test_restored_objects_train_on_in_fp32_as_by_hand(level, name):
    ours, by_hand = ByAmp(level, name), ByHand(level, name)
    for side in (ours, by_hand):
        plain(side)
    amp.restore(ours.model, ours.optimizer)
    rest = Loop("O0", [p.detach().float() for p in by_hand.stepped], loops.OPTIMIZERS[name])
    rest.optimizer.load_state_dict(by_hand.optimizer.state_dict())
    for x, y in loops.batches(3, seed=2):
        loops.plain_step(ours.model, ours.optimizer, x, y)
        rest.train_step(x, y)
    assert loops.same(ours.params, rest.stepped)
    states = [side.optimizer.state_dict()["state"] for side in (ours, rest)]
    assert loops.same(*states)
