"""Random programs on two ranks against the rules: a pass that sends averages the whole gradient.

Weights, gradients and scales are few-bit numbers, so every level is exact.
"""

import contextlib
import itertools
import math
import random
import warnings

import pytest
import torch

from apex import amp
from tests.distributed import cases
from tests.support import loops

pytestmark = pytest.mark.distributed

RATE = 0.125
OPTIONS = {
    "O1": {"loss_scale": "dynamic"},
    "O2": {"loss_scale": "dynamic"},
    "O2 static": {"loss_scale": 8.0},
    "O4": {},
    "O5": {},
}
WRAPPERS = ["torch", "torch views", "apex", "apex delayed"]
CALLS = ["block"] * 4 + ["no_sync", "delayed", "step", "plain"] * 2
CALLS += ["clear", "edit", "evaluate", "drop_loss"]


class Program:
    """A training of four weights by one optimizer or two, and what the rules say of it."""

    def __init__(self, rank, level, wrapper, choose):
        self.rank, self.choose = rank, choose
        self.model = loops.Weights("abcd")
        self.names = choose.choice([["abcd"], ["ab", "cd"]])
        self.optimizers = [
            torch.optim.SGD(map(self.model.get_parameter, names), lr=RATE) for names in self.names
        ]
        options = OPTIONS[level]
        cases.initialized(level[:2], self.model, self.optimizers, num_losses=2, **options)
        self.dynamic = options.get("loss_scale") == "dynamic"
        self.scales = [2.0**6, 2.0**4] if self.dynamic else [options.get("loss_scale", 1.0)] * 2
        for scaler, scale in zip(amp._amp_state.loss_scalers, self.scales, strict=True):
            scaler._loss_scale = scale
        self.parallel = cases.WRAPPERS[wrapper](self.model)
        with self.parallel.no_sync():
            self.parallel(a=1.0)  # amp knows a wrapper from its first forward pass on
        self.ways = ["no_sync"]
        if wrapper != "apex delayed":  # which sends a pass around it, too
            self.ways += ["around", "around in no_sync"]
        if wrapper.startswith("apex"):
            self.ways.append("disable_allreduce")
        self.weights = dict.fromkeys("abcd", 1.0)
        self.grads = {}  # of both ranks
        self.is_local = False
        # Whether a forward pass has begun to send, and no pass has done so yet.
        self.awaits_pass = False
        self.unchecked = set()  # optimizers
        # Of an optimizer: the losses of its delayed passes, whose scales follow the check.
        self.delayed_losses = [set() for _ in self.names]
        self.skips = [False] * len(self.names)

    def run_pass(self, indices, *, local=False, overflows=False, **options):
        """A pass for some optimizers, which all weights are in; ``None`` for one without amp."""
        factors = {name: [float(self.choose.randint(-3, 3)) for _ in range(2)] for name in "abcd"}
        overflowed = self.choose.choice("abcd") if overflows else None
        if overflowed:
            factors[overflowed][self.choose.randrange(2)] = math.inf
        way = self.choose.choice(self.ways) if local else "sends"
        if way == "disable_allreduce":
            self.parallel.disable_allreduce()
        with self.parallel.no_sync() if "no_sync" in way else contextlib.nullcontext():
            model = self.model if "around" in way else self.parallel
            inputs = {
                name: torch.tensor(pair[self.rank], requires_grad=True)
                for name, pair in factors.items()
            }
            loss = model(**inputs)
            self.interpose(loss, [*inputs.values()])
            if indices is None:
                loss.backward()
            else:
                given = [self.optimizers[index] for index in indices]
                loops.scaled_backward(loss, given, **options)
        if way == "disable_allreduce":
            self.parallel.enable_allreduce()
        local = local and not self.awaits_pass
        for name, pair in factors.items():
            before = self.grads.get(name, [0.0, 0.0])
            total = [old + new for old, new in zip(before, pair, strict=True)]
            self.grads[name] = total if local else [sum(total) / 2.0] * 2
        self.is_local = local
        self.awaits_pass = False
        return overflowed

    def interpose(self, loss, inputs):
        """What a script may do between a forward pass and its backward pass."""
        if self.choose.random() < 0.2:  # as of an attack, or of a balance of losses
            leaves = self.choose.choice([inputs, [*self.model.parameters()]])
            torch.autograd.grad(loss, leaves, retain_graph=True)
        if self.choose.random() < 0.2:
            self.clear()
        if self.choose.random() < 0.2:
            with self.parallel.no_sync():
                self.parallel(a=1.0)

    def block(self, *, local=False, delays=False, indices=None):
        count = len(self.optimizers)
        if indices is None:
            indices = self.choose.sample(range(count), self.choose.randint(1, count))
        overflows = self.dynamic and self.choose.random() < 0.1
        options = {"loss_id": self.choose.randrange(2), "delay_unscale": delays}
        is_sent = not local or self.awaits_pass
        overflowed = self.run_pass(indices, local=local, overflows=overflows, **options)
        is_checked = is_sent and not delays
        checked_losses = self.end_block(indices, options["loss_id"], is_checked=is_checked)
        if not is_checked:
            self.unchecked.update(indices)
            return
        self.unchecked.difference_update(indices)
        # An overflow that another block has found already concerns its own optimizer alone.
        shared = ""
        for each in indices:
            if not self.skips[each] or overflowed in [*self.names[each]]:
                shared += self.names[each]
        known = list(self.skips)
        for index, own in enumerate(self.names):
            names = own + shared if index in indices else own
            self.skips[index] = any(math.isinf(self.grads[name][0]) for name in names)
        if any(self.skips[index] and not known[index] for index in indices):
            for loss_id in checked_losses:
                self.scales[loss_id] /= 2.0
        if any(self.skips):
            self.step()

    def end_block(self, indices, loss_id, *, is_checked):
        """Returns the losses whose gradients the block has left, or checked."""
        losses = {loss_id}.union(*(self.delayed_losses[index] for index in indices))
        for index in range(len(self.names)):
            if is_checked or index not in indices:
                self.delayed_losses[index] = set()
            else:
                self.delayed_losses[index].add(loss_id)
        return losses

    def no_sync(self):
        self.block(local=True)

    def delayed(self):
        self.block(delays=True)

    def plain(self):
        self.run_pass(None, local=self.choose.random() < 0.3)

    def edit(self):
        """Doubles a gradient of the model, or of what is stepped."""
        name = self.choose.choice("abcd")
        if name not in self.grads:
            return
        masters = [p for each in self.optimizers for p in amp.master_params(each)]
        sides = [getattr(self.model, name), masters["abcd".index(name)]]
        param = self.choose.choice(sides)
        if self.choose.random() < 0.5:
            param.grad.mul_(2.0)
        else:
            param.grad = param.grad * 2.0
        self.grads[name] = [2.0 * each for each in self.grads[name]]

    def clear(self):
        way = self.choose.choice(["optimizers", "zeros", "wrapper", "by hand"])
        if way == "wrapper":
            self.parallel.zero_grad()
        elif way == "by hand":
            for param in self.parallel.parameters():
                param.grad = None
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=way == "optimizers")
            self.delayed_losses = [set() for _ in self.names]
        self.grads.clear()

    def evaluate(self):
        with torch.no_grad():
            self.parallel(a=1.0)

    def drop_loss(self):
        """A forward pass that no pass for all weights follows, as of a batch that is skipped."""
        is_sent = self.choose.random() < 0.5
        with contextlib.nullcontext() if is_sent else self.parallel.no_sync():
            loss = self.parallel(**dict.fromkeys("abcd", 1.0))
        self.awaits_pass |= is_sent
        is_finite = all(math.isfinite(value) for pair in self.grads.values() for value in pair)
        way = self.choose.choice(["nothing", "empty block", "gradients"])
        if way == "gradients":
            torch.autograd.grad(loss, [*self.model.parameters()])
        elif way == "empty block" and is_finite:  # else it would find the overflow
            (index,) = self.choose.sample(range(len(self.optimizers)), 1)
            with amp.scale_loss(loss, self.optimizers[index]):
                pass
            self.end_block([index], 0, is_checked=self.awaits_pass)

    def step(self):
        if self.is_local or self.unchecked:
            self.block(indices=[*range(len(self.optimizers))])
        if not self.grads:  # amp would warn
            return
        for optimizer, names, skips in zip(self.optimizers, self.names, self.skips, strict=True):
            optimizer.step()
            assert amp.step_was_skipped(optimizer, on_host=True) is skips
            for name in names:
                if not skips:
                    self.weights[name] -= RATE * self.grads.get(name, [0.0])[0]
        if any(self.skips):
            self.skips = [False] * len(self.names)
            self.clear()

    def check(self):
        for name, pair in self.grads.items():
            grad = getattr(self.model, name).grad
            assert math.isinf(pair[self.rank]) or grad.tolist() == [pair[self.rank]] * 2
        masters = [p[0].item() for each in self.optimizers for p in amp.master_params(each)]
        assert masters == [*self.weights.values()]
        assert [loops.scale(index) for index in range(2)] == self.scales


def run_programs(rank, level):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer.step.. got gradients that no amp.scale_loss")
        warnings.filterwarnings("ignore", "Gradients of a skipped step")
        for wrapper, seed in itertools.product(WRAPPERS, range(40)):
            run_program(rank, level, wrapper, seed)


def run_program(rank, level, wrapper, seed):
    choose = random.Random(seed)
    program, done = Program(rank, level, wrapper, choose), []
    try:
        for _ in range(choose.randint(3, 14)):
            done.append(choose.choice(CALLS))
            getattr(program, done[-1])()
            program.check()
    except Exception as error:
        raise AssertionError(f"{wrapper}, seed {seed}: {program.names} {done}") from error


@pytest.mark.parametrize("level", OPTIONS)
def test_random_programs_follow_the_rules(on_two_ranks, level):
    on_two_ranks(run_programs, level)
