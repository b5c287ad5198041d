"""Targets and results for the tests of ``apex compare``."""

import math
import random
from dataclasses import replace

import torch

from apex.tools.compare.results import LEVELS, Comparison, Result, Stored, parse_levels
from apex.tools.compare.results import Training as Record
from apex.tools.compare.run import Options, compare
from apex.tools.compare.timing import Load
from apex.tools.compare.verdict import recommendation

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

FAILS_IN_BF16 = TARGET.replace(
    "    return nn",
    "    if model(inputs).dtype == torch.bfloat16:\n"
    "        raise RuntimeError('no kernel for bf16')\n"
    "    return nn",
)


IDLE = Load(0.0, 1)
SOUND_LOSSES = tuple(1.0 / step for step in range(1, 26))


def written(folder, text=TARGET, name="target.py"):
    """Writes a target; returns how the command names it."""
    path = folder / name
    path.write_text(text)
    return str(path)


def compared(target, levels="O0,O4", *, steps=4, rounds=2, seed=0, stages=None, patience=math.inf):
    """Compares on the CPU; notes each stage."""
    given = parse_levels(levels)
    options = Options(given, steps, rounds, seed, torch.device("cpu"), patience)
    return compare(target, options, ([] if stages is None else stages).append)


def by_name(comparison):
    """Returns the results by the names of their levels."""
    return {result.name: result for result in comparison.results}


def samples_of(name, milliseconds, spread):
    """Returns 20 times around a median, within ``spread`` of it, in an order of the level's own."""
    draw = random.Random(name).uniform
    return tuple(milliseconds + draw(-spread, spread) for _ in range(20))


def result_of(
    name="O0", *, milliseconds=10.0, spread=0.1, samples=(), errors=(), saved=4000, **changes
):
    """Returns a made-up result: a sound training, 25 steps long."""
    values = {"losses": SOUND_LOSSES, "loss_scales": (1.0,) * 26, "frozen": 0.0}
    stored = Stored(params=100, model=400, masters=0, optimizer=800)
    record = Record(
        **{"stored": stored, "saved_bytes": saved, "peak_bytes": None, **values, **changes}
    )
    times = tuple(samples) or samples_of(name, milliseconds, spread)
    return Result(LEVELS[name], training=record, times=times, errors=errors)


def comparison_of(*results, **changes):
    """Returns a comparison of made-up results, with its recommendation."""
    values = {"target": "a.py", "machine": "a <machine>", "steps": 25, "seed": 0, "load": IDLE}
    found = Comparison(results=results, **{"notes": (), **values, **changes})
    return replace(found, recommendation=recommendation(found))
