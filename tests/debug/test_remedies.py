"""Every remedy that a report prints is applied as written to a failing script, and cures it."""

import gc
import os
import re

import pytest
from torch import nn

from apex.debug.causes import data
from apex.debug.check import FrozenUpdates
from apex.debug.rounding import RoundingTrace
from apex.tools.script import FaultFound, Script
from apex.tools.script_trace import ScriptTrace

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from apex import amp
torch.manual_seed(0)

def formula(x):
    return {formula}

class Inner(nn.Module):
    def forward(self, x):
        y = formula(x)
        y = y.float()
        return x + (y / y.detach().abs().amax().clamp_min(1.0)).mean().to(x.dtype)

def batch():
    return torch.linspace(0.1, 1.0, 16).view(4, 4)

def criterion(output):
    return output.float().mean()

model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 2))
nn.init.eye_(model[0].weight)
nn.init.zeros_(model[0].bias)
"""
OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=1e-3)"
LOOP = """\
for step in range(3):
    optimizer.zero_grad()
    x = batch()
    {forward}
    loss = criterion(output)
    {backward}
"""
BACKWARD = "loss.backward()\n    optimizer.step()"
SCALED = "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()"
BLOCK = "with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n    "
AUTOCAST = 'with torch.autocast("cpu", torch.float16): output = model(x)'
INITIALIZE = (
    'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}"{scale}, verbosity=0)'
)


def script(way, formula="x", optimizer=OPTIMIZER, loop=LOOP, scale=""):
    """Returns a training script for one way of training."""
    setup, forward, backward = "", "output = model(x)", BACKWARD
    if way in ("half", "bfloat16"):
        optimizer = optimizer.replace("model.p", f"model.{way}().p")
        forward = f"output = model(x.{way}())"
    if way.startswith("autocast"):
        forward = AUTOCAST
    if way == "autocast, scaler":
        setup = "scaler = torch.amp.GradScaler('cpu', init_scale=256.0)\n"
        backward = SCALED
    if way in LEVELS:
        setup = INITIALIZE.format(level=way, scale=scale) + "\n"
        backward = BLOCK + "optimizer.step()"
    head = HEAD.replace("{formula}", formula)
    rest = loop.replace("{forward}", forward).replace("{backward}", backward)
    return f"{head}optimizer = {optimizer}\nscaler = None\n{setup}{rest}"


def at(*ways, **options):
    return {way: script(way, **options) for way in ways}


LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WAYS = ("fp32", "half", "bfloat16", "autocast", "autocast, scaler", *LEVELS)
"""Causes run at all, formulas in fp32, 16 bits and every sixth; with ``STRESS=1`` at all."""


@pytest.fixture
def first_of(tmp_path):
    """Traces a script, and returns the first fault; of digits or updates, the worst."""

    def run(text, look="nan"):
        gc.collect()  # ends the session of the script before
        path = tmp_path / f"train{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        tools = {"digits": RoundingTrace, "updates": FrozenUpdates}
        tool = ScriptTrace(on_fault=stop) if look == "nan" else tools[look]()
        with tool:
            ending = Script(str(path)).run()
        assert not ending.error, text
        for param in gc.get_objects() if "register_hook" in text else ():
            if type(param) is nn.Parameter and param._backward_hooks:
                param._backward_hooks.clear()  # autograd keeps them, and the script's globals
        return tool.seen().first if look == "nan" else tool.worst

    return run


def stop():
    raise FaultFound


def changed(text, changes):
    for change in changes:
        old, _, new = change.partition(" => ")
        text = text.replace(old, new)
    return text


SHARED = ("a module in fp32", "in fp32", "a loss in fp32", "in bf16")
"""Sections whose remedies are printed with those of others."""


def changes_of(remedy, section):
    """Returns the changes that stand behind a remedy in causes.ini."""
    for name in (section, *SHARED):
        for line in data()[name].get("remedies", "").split("\n")[1:]:
            text, *changes = line.split(" | ")
            text = text.rpartition(" :: ")[2]
            if re.fullmatch(".*".join(map(re.escape, re.split(r"\{.*?\}", text))), remedy):
                return changes
    raise AssertionError(remedy)


def is_of(finding, section):
    why = data()[section].get("why")
    known = finding.pattern == section
    return known or (not finding.pattern and why and finding.why[:9] == why[:9])


def cures(first_of, section, scripts, look="nan"):
    """Checks all remedies at all ways at which the scripts fail; returns these ways."""
    failed = []
    for way, text in scripts.items():
        first = first_of(text, look)
        if first is None or not is_of(first, section):
            continue
        failed.append(way)
        assert 0 < len(first.remedies) <= 3
        for remedy in first.remedies:
            changes = changes_of(remedy, section)
            if changes:
                better = changed(text, changes)
                assert better != text, (way, remedy)
                assert first_of(better, look) is None, (way, remedy, better)
    return failed


FORMULAS = [section for section, row in data().items() if "fails" in row]
DIGITS = (
    "cancellation",
    "an integer that was rounded",
    "an early rounding",
    "chain",
    "a chain of gradients of one value",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(6))
def test_every_remedy_for_a_formula_cures_it_at_each_way_of_training(first_of, part):
    for index, section in list(enumerate(FORMULAS))[part::6]:
        measured = section in DIGITS
        low = "bfloat16" if "bfloat16" in data()[section].get("if", "") else "half"
        every = os.environ.get("STRESS") or not (measured or "ops" in data()[section])
        ways = WAYS if every else dict.fromkeys(["fp32", low, *WAYS[index % 6 :: 6]])
        scripts = at(*ways, formula=data()[section]["fails"], loop=SHORT)
        assert cures(first_of, section, scripts, "digits" if measured else "nan"), section


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
READ = "norms = [param.grad.norm().item() for param in model.parameters()]"
BIG = LOOP.replace("criterion(output)", "(output.float() * 7e4).sum()")
LARGE = LOOP.replace("x = batch()", "x = batch() * 1e6")
STEEP = LOOP.replace("criterion(output)", "(output.float() * 1e20).mean()")
STEEP16 = LOOP.replace("criterion(output)", "(output.float() * 1e2).mean()")
LONG = LOOP.replace("range(3)", "range(9)")
SHORT = LOOP.replace("range(3)", "range(2)")
SQUARES = LOOP.replace("criterion(output)", "(output.float() * 4e4).mean()")
NEGATIVE = 'optimizer.step()\n    for p in optimizer.state: optimizer.state[p]["exp_avg_sq"].neg_()'
ONE = LOOP.replace("x = batch()", "x = batch() * torch.eye(4)[0]")
"""With one input alone, so that most gradients are 0."""
STATIC = ", loss_scale=2.0**24"
HIGH = script("autocast, scaler").replace("256.0", "2.0**30")
AGAIN = HIGH.replace("scaler.update()", "scaler.update(); optimizer.step()")
TWICE = script("autocast, scaler").replace("scaler.scale(loss)", "scaler.scale(scaler.scale(loss))")
GRADIENT = "torch.autograd.grad(scaler.scale(output.float().sum()), x, create_graph=True)[0]"
PENALIZED = (
    script("autocast, scaler")
    .replace("batch()\n    with", "batch().requires_grad_()\n    with")
    .replace("= criterion(output)", f"= criterion(output) + {GRADIENT}.norm() - 1")
)
MANY = """\
for step in range(150):
    x = batch()
    {forward}
    criterion(output).backward()
optimizer.step()
"""


def scaled(way, line):
    """Returns a script that does something to gradients before they are unscaled."""
    text = script(way, scale=", loss_scale=1024.0" if way == "O3" else "")
    if way in LEVELS:
        return text.replace("scaled.backward()", f"scaled.backward()\n        {line}")
    return text.replace("    scaler.step(", f"    {line}\n    scaler.step(")


HOOK = "for p in model.parameters(): p.register_hook(lambda grad: grad.clamp(-1.0, 1.0))\n"


def sgd(lr):
    return OPTIMIZER.replace("1e-3", lr)


def adam(lr="1e-3", eps=""):
    return f"torch.optim.Adam(model.parameters(), lr={lr}{eps})"


FLAT = script("fp32", optimizer=adam(eps=", eps=0.0"), loop=STEEP.replace("1e20", "1e-30"))
SCALERS = ("autocast, scaler", "O1", "O2", "O3")
LOOPS = {
    "a clip of scaled gradients": {way: scaled(way, CLIP) for way in SCALERS},
    "a reading of scaled gradients": {way: scaled(way, READ) for way in SCALERS},
    "a step on scaled gradients": {
        "autocast, scaler": script("autocast, scaler").replace(
            "scaler.step(optimizer)\n    scaler.update()", "optimizer.step()"
        ),
        "O1": scaled("O1", "plain.step()").replace("scaler = None", f"plain = {OPTIMIZER}"),
    },
    "a static loss scale": at("O1", "O2", scale=STATIC),
    "a gradient in fp16": at("half", "autocast", "O3", loop=BIG, optimizer=sgd("1e-9")),
    "a cast to fp16": at("half", "autocast", "autocast, scaler", "O2", "O3", loop=LARGE),
    "growth": at("fp32", "autocast", "O1", "O5", optimizer=sgd("1e9"), loop=LONG),
    "a product with weights that are much too large": {
        way: script(way).replace("eye_(model[0].weight)", "constant_(model[0].weight, 6e4)")
        for way in ("half", "autocast", "O1", "O2", "O3")
    },
    "a clip of scaled gradients in a backward pass": at(
        "autocast, scaler", "O2", "O3", scale=", loss_scale=1024.0", loop=HOOK + LOOP
    ),
    "uncleared gradients": {"autocast, scaler": HIGH.replace("optimizer.zero_grad()", "pass")},
    "a steep gradient in fp16": at("half", "autocast", "O3", loop=STEEP, optimizer=sgd("1e-30")),
    "a loss that is scaled twice": {"autocast, scaler": TWICE},
    "a penalty of scaled gradients": {"autocast, scaler": PENALIZED},
    "skipped step": {"autocast, scaler": AGAIN},
    "update": {"fp32": script("fp32", optimizer=sgd("1e30"), loop=STEEP)},
    "an update in fp16": at("half", "O3", optimizer=sgd("6e4"), loop=STEEP16),
    "an average of squared gradients": at(
        "half", "O3", optimizer=adam(eps=", eps=1e-4"), loop=SQUARES
    ),
    "a root of the optimizer's state": {
        "fp32": script("fp32", optimizer=adam()).replace("optimizer.step()", NEGATIVE)
    },
    "an eps that is 0 in fp16": at("half", "O3", optimizer=adam(), loop=ONE),
    "a learning rate": {"fp32": script("fp32", optimizer=adam('float("inf")'))},
    "a division by 0 in an update": {"fp32": FLAT},
    "an undefined update": {"fp32": script("fp32", optimizer=adam(eps=", eps=0.0"), loop=ONE)},
}

ADAM = script("bfloat16", optimizer=adam("1e-1"))
TINY = LOOP.replace("criterion(output)", "(output.float() * 1e-9).mean()")
COUNT = LOOP.replace(
    "for step", "count = torch.full((), 512.0, dtype=torch.bfloat16)\nfor step"
).replace("x = batch()", "x = batch() * count.add_(1).item()")
FIRST = {
    way: script(way, formula="(x * 300).cos()")
    .replace("nn.Linear(4, 4), ", "")
    .replace("model[0]", "model[-1]")
    for way in ("O2", "O5")
}
MEASURED = {
    "a rounded argument": ("digits", FIRST),
    "lost update": ("digits", at("fp32", "O4", "bfloat16", loop=COUNT)),
    "underflow": ("digits", at("autocast", "O1", "O2", "O3", loop=TINY, scale=", loss_scale=1.0")),
    "chain of gradients": ("digits", {"bfloat16": script("bfloat16", loop=MANY)}),
    "an average that cannot fall": ("updates", {"bfloat16": ADAM}),
    "frozen": ("updates", at("bfloat16", "O3", optimizer=sgd("1e-5"))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", MEASURED)
def test_every_remedy_for_lost_digits_and_updates_cures_it(first_of, section):
    look, scripts = MEASURED[section]
    assert cures(first_of, section, scripts, look) == list(scripts)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", LOOPS)
def test_every_remedy_for_a_training_loop_cures_it(first_of, section):
    assert cures(first_of, section, LOOPS[section]) == list(LOOPS[section])
