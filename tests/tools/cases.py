"""Targets and results for the tests of the tools."""

import io
import math
import random
from dataclasses import replace
from functools import partial

import torch

from apex.tools.compare import Options, compare
from apex.tools.progress import Progress
from apex.tools.recommend import recommendation
from apex.tools.results import Comparison, Distance, ModuleError, Probe, Result, Stored, Timing
from apex.tools.results import Training as Record
from apex.tools.variants import VARIANTS, parse_variants

TARGET = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batches = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(3)]


def loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).float(), labels)
"""


def written(folder, text=TARGET, name="target.py"):
    """Writes a target; returns how the command names it."""
    path = folder / name
    path.write_text(text)
    return str(path)


def compared(
    target,
    levels="O0,O4",
    *,
    steps=4,
    rounds=2,
    seed=0,
    emulated_steps=2,
    stream=None,
    suggest_fp32=False,
):
    """Compares on the CPU; progress goes to ``stream``."""
    options = Options(
        variants=parse_variants(levels),
        steps=steps,
        emulated_steps=emulated_steps,
        rounds=rounds,
        seed=seed,
        device=torch.device("cpu"),
        suggest_fp32=suggest_fp32,
    )
    return compare(
        target, options, partial(Progress, file=stream or io.StringIO(), seconds=math.inf)
    )


def by_name(comparison):
    """Returns the results by the names of their levels."""
    return {result.name: result for result in comparison.results}


def samples_of(name, milliseconds, spread, rounds=20):
    """Returns times around a median, within ``spread`` of it, in an order of the level's own."""
    draw = random.Random(name).uniform
    return tuple(milliseconds + draw(-spread, spread) for _ in range(rounds))


def result_of(
    name="O0", *, milliseconds=10.0, spread=0.1, samples=(), errors=(), probe=(), **changes
):
    """Returns a made-up result: a sound training, ten steps long."""
    emulated = changes.pop("emulated", False)
    record = Record(
        **{
            "losses": tuple(1.0 / step for step in range(1, 11)),
            "loss_scales": (1.0,) * 11,
            "frozen": ((5, 0.0), (10, 0.0)),
            "stored": Stored(params=100, model=400, masters=0, optimizer=800),
            "distance": Distance(steps=10, weights=0.01, loss=0.0),
            **changes,
        }
    )
    seen = {
        "compute_dtype": str(VARIANTS[name].dtype).removeprefix("torch."),
        "modules": (ModuleError("0", "Linear", 1e-4), ModuleError("", "Sequential", 0.5)),
        "eps": 0.01,
        "underflow": 0.0,
        "activation_bytes": 4000,
    }
    return Result(
        VARIANTS[name],
        slowdown=30.0 if emulated else 1.0,
        emulated=emulated,
        training=record,
        timing=Timing(tuple(samples) or samples_of(name, milliseconds, spread)),
        probe=Probe(**seen | dict(probe)),
        errors=errors,
    )


def comparison_of(*results, **changes):
    """Returns a comparison of made-up results, with its recommendation."""
    values = {"target": "a.py", "machine": "a <machine>", "steps": 10, "seed": 0} | changes
    found = Comparison(results=results, **values)
    return replace(found, recommendation=recommendation(found))
