"""Random programs against a model of the three rules; ``STRESS=1`` runs many more.

Weights, gradients and rates are few-bit numbers, so every level is exact.
"""

import os
import random

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

SEEDS = range(2000 if os.environ.get("STRESS") else 40)
RATE = 0.125
LEVELS = {"O2": {"loss_scale": "dynamic"}, "O2 static": {"loss_scale": 8.0}, "O5": {}}


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, a, b):
        return (self.a.float() * a).sum() + (self.b.float() * b).sum()


class Program:
    """A training, and what the rules say of it."""

    def __init__(self, level, choose):
        self.choose = choose
        self.model = Weights()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        options = LEVELS[level]
        amp.initialize(self.model, self.optimizer, opt_level=level[:2], verbosity=0, **options)
        self.dynamic = options.get("loss_scale") == "dynamic"
        if self.dynamic:
            amp._amp_state.loss_scalers[0]._loss_scale = 2.0**8
        self.masters, self.weights = [1.0, 1.0], [1.0, 1.0]
        self.grads, self.flag = [None, None], False
        self.master_written = self.weight_written = False

    def number(self):
        return self.choose.randint(-16, 16) * RATE

    def forward(self):
        if self.master_written:
            self.weights = list(self.masters)
            self.master_written = self.weight_written = False

    def block(self):
        factors = [float(self.choose.randint(1, 2)) for _ in "ab"]
        overflows = self.dynamic and self.choose.random() < 0.2
        if overflows:
            factors[self.choose.randint(0, 1)] = torch.inf
        loss = self.model(*factors)
        self.forward()
        delays = self.choose.random() < 0.2 and not overflows
        loops.scaled_backward(loss, self.optimizer, delay_unscale=delays)
        self.grads = [(g or 0.0) + f for g, f in zip(self.grads, factors, strict=True)]
        self.flag = self.flag or overflows

    def step(self):
        self.optimizer.step()
        if self.weight_written and not self.master_written:
            self.masters = list(self.weights)
        if not self.flag:
            moves = [RATE * (grad or 0.0) for grad in self.grads]
            self.masters = [m - move for m, move in zip(self.masters, moves, strict=True)]
        self.weights, self.flag, self.grads = list(self.masters), False, [None, None]
        self.master_written = self.weight_written = False
        self.check()

    def clear(self):
        self.choose.choice([self.optimizer, self.model]).zero_grad()
        self.grads = [None, None]

    def write_masters(self):
        self.masters = [self.number(), self.number()]
        params = list(self.optimizer.param_groups[0]["params"])
        values = [torch.full((2,), value) for value in self.masters]
        loops.change(params, values, self.choose.choice(["data", "copy_", "data.copy_"]))
        self.master_written = True

    def write_weights(self):
        if self.master_written:
            self.model(0.0, 0.0)
            self.forward()
        self.weights = [self.number(), self.number()]
        values = [
            torch.full_like(p, v)
            for p, v in zip(self.model.parameters(), self.weights, strict=True)
        ]
        loops.change(self.model.parameters(), values, self.choose.choice(["data", "copy_"]))
        self.weight_written = True

    def swap(self):
        self.model(0.0, 0.0)
        self.forward()
        own = loops.values(self.model.parameters())
        loops.change(self.model.parameters(), [torch.zeros_like(p) for p in own], "copy_")
        self.model(1.0, 1.0)
        loops.change(self.model.parameters(), own, self.choose.choice(["data", "copy_"]))

    def save(self):
        state = self.model.state_dict()
        self.forward()
        assert [value[0].item() for value in state.values()] == self.weights

    def check(self):
        assert [p[0].item() for p in self.model.parameters()] == self.weights
        assert [p[0].item() for p in self.optimizer.param_groups[0]["params"]] == self.masters


CALLS = ["block"] * 6 + ["step"] * 4 + ["clear", "write_masters", "write_weights", "swap", "save"]


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
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
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {done}") from error
