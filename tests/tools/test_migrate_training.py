"""Rewritten programs train to the same losses, bit by bit."""

import pytest

pytest.importorskip("libcst", reason="the migrate extra is not installed")

from tests.tools.migrate_cases import HEAD, PLAIN, changed_lines, losses_of, to_torch, trained


def same_after(program):
    before, after = trained(program)
    assert len(before) >= 8
    assert before[-1] < before[0]
    return before == after


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_the_three_lines_train_to_the_same_losses(level):
    assert same_after(PLAIN.replace("O1", level))


def test_the_levels_differ_on_this_net():
    losses = [losses_of(PLAIN.replace("O1", level)) for level in ("O0", "O1", "O4")]
    assert len(set(map(tuple, losses))) == 3


IN_FUNCTIONS = HEAD + (
    """
def forward(net, batch):
    x, y = batch
    return F.cross_entropy(net(x).float(), y)

@torch.no_grad()
def evaluate(net):
    net.eval()
    total = 0.0
    for x, y in batches:
        outputs = net(x)
        total += F.cross_entropy(outputs.float(), y).item()
    net.train()
    return total

def train(net, opt):
    for batch in batches:
        loss = forward(net, batch)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(opt), 0.1)
        opt.step()
        losses.append(loss.item())

def main(model, optimizer):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    train(model, optimizer)
    losses.append(evaluate(model) / 1000)

main(model, optimizer)
"""
)


def test_steps_in_another_function_train_to_the_same_losses_and_evaluate_alike():
    assert same_after(IN_FUNCTIONS)
    assert to_torch(IN_FUNCTIONS)[0].count("torch.autocast") == 2


TRAINER = HEAD + (
    """
class Trainer:
    def __init__(self):
        self.model, self.optimizer = amp.initialize(
            model, optimizer, opt_level="O1", growth_interval=3, verbosity=0
        )

    def train(self, times):
        for x, y in batches:
            self.optimizer.zero_grad()
            for _ in range(times):
                loss = self.loss(x, y) / times
                with amp.scale_loss(loss, self.optimizer) as scaled:
                    scaled.backward()
            if times:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            losses.append(loss.item())

    def loss(self, x, y):
        return F.cross_entropy(self.model(x).float(), y)

Trainer().train(1)
"""
)


def test_a_trainer_class_keeps_its_scaler_and_trains_to_the_same_losses():
    assert same_after(TRAINER)
    new = changed_lines(TRAINER, to_torch(TRAINER)[0])
    assert "self.model, self.optimizer = model, optimizer" in new
    assert (
        "self.scaler = torch.amp.GradScaler("
        "next(self.model.parameters()).device.type, growth_interval=3)"
    ) in new
    assert new[-3:] == [
        "self.scaler.unscale_(self.optimizer)",
        "self.scaler.step(self.optimizer)",
        "self.scaler.update()",
    ]


OPTIONAL = """
import argparse
import torch
import torch.nn.functional as F
from torch import nn

batches = [(torch.randn(5, 6), torch.randint(3, (5,)))] * 8
losses = []

def train(args, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("install apex to train in fp16")
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model.zero_grad()
    for step, (x, y) in enumerate(batches):
        model.train()
        x = x.to(args.device)
        loss = F.cross_entropy(model(x).float(), y)
        if args.accumulate > 1:
            loss = loss / args.accumulate
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % args.accumulate == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            model.zero_grad()

args = argparse.Namespace(fp16=True, accumulate=2, clip=0.5, device="cpu")
train(args, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
"""


@pytest.mark.parametrize("fp16", [True, False])
def test_amp_behind_a_switch_stays_behind_it(fp16):
    program = OPTIONAL.replace("fp16=True", f"fp16={fp16}")
    assert same_after(program)
    after, notes = to_torch(program)
    assert "apex" not in after.replace("install apex", "")
    assert after.count("enabled=args.fp16") == 2
    assert any("once for each step" in note for note in notes)


ENABLED = PLAIN.replace('opt_level="O1"', 'enabled=use_amp, opt_level="O1"')


@pytest.mark.parametrize("use_amp", [True, False])
def test_the_argument_enabled_becomes_that_of_autocast_and_scaler(use_amp):
    assert same_after(ENABLED.replace("losses = []", f"losses = []\nuse_amp = {use_amp}"))


RESUMED = PLAIN.replace(
    "for x, y in batches:",
    "amp.load_state_dict(saved)\nfor x, y in batches:",
)


def test_the_state_of_the_scaler_is_saved_and_loaded():
    program = PLAIN + "saved = amp.state_dict()\namp.load_state_dict(saved)\n"
    assert same_after(program)
    assert changed_lines(program, to_torch(program)[0])[-2:] == [
        "saved = scaler.state_dict()",
        "scaler.load_state_dict(saved)",
    ]


def test_without_a_scaler_there_is_no_state():
    program = (PLAIN + "saved = amp.state_dict()\namp.load_state_dict(saved)\n").replace("O1", "O4")
    assert same_after(program)
    assert to_torch(program)[0].endswith("saved = {}\n")


def test_overflows_are_skipped_alike():
    program = PLAIN.replace(
        "    with amp", "    if len(losses) in (2, 5):\n        loss = loss * 1e38\n    with amp"
    )
    before, after = trained(program)
    assert before == after


def test_targets_computed_in_the_loop_are_computed_under_the_casts():
    program = PLAIN.replace(
        "    optimizer.zero_grad()\n    loss = F.cross_entropy(model(x).float(), y)",
        "    y = torch.tanh(x @ x.t() @ x)[:, :3].float()\n"
        "    optimizer.zero_grad()\n    loss = F.mse_loss(model(x).float(), y)",
    ).replace("O1", "O4")
    assert same_after(program)
