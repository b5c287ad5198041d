"""The levels to compare, the results of each, and their form as JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from apex._core import dtypes
from apex.debug.common import json_types
from apex.tools.compare.timing import Interval, Load, speed_of
from apex.tools.errors import InputError
from apex.tools.source import did_you_mean


@dataclass(frozen=True)
class Level:
    """One way of training.

    Attributes:
        name: As on the command line.
        dtype: Dtype of matrix products and convolutions.
        meaning: Short description.
        autocast: Whether it trains with ``torch.autocast``, in fp16 with a ``GradScaler``, instead
            of ``amp.initialize``.
        casts: Whether operators cast their inputs, and the weights stay fp32.
        options: Arguments of ``amp.initialize``; ``None`` if ``opt_level`` is the name.
        advised: Whether it may be recommended; the others are for comparison only.
    """

    name: str
    dtype: torch.dtype
    meaning: str
    autocast: bool = False
    casts: bool = False
    options: Mapping[str, Any] | None = None
    advised: bool = True


BASELINE = "O0"
_HALF = torch.float16
_BF16 = torch.bfloat16
_PLAIN = {"opt_level": "O5", "master_weights": False, "keep_batchnorm_fp32": False}
_TORCH: Any = {"autocast": True, "casts": True}

LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in (
        Level(BASELINE, torch.float32, "fp32 throughout", advised=False),
        Level("O1", _HALF, "fp16 where it is safe, fp32 weights", casts=True),
        Level("O2", _HALF, "fp16 model, fp32 batch norm and masters"),
        Level("O3", _HALF, "fp16 throughout, no masters", advised=False),
        Level("O4", _BF16, "bf16 where it is safe, fp32 weights", casts=True),
        Level("O5", _BF16, "bf16 model, fp32 batch norm and masters"),
        Level("autocast-fp16", _HALF, "torch.autocast and GradScaler", **_TORCH),
        Level("autocast-bf16", _BF16, "torch.autocast", **_TORCH),
        Level("bf16", _BF16, "bf16 throughout, no masters", options=_PLAIN, advised=False),
    )
}
"""By name, in display order."""


def parse_levels(names: str | None) -> tuple[Level, ...]:
    """Returns the levels of a list such as ``"O4,O5"`` and the baseline; for None, all levels.

    Raises:
        InputError: For an unknown name.
    """
    if names is None:
        return tuple(LEVELS.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in LEVELS:
            raise InputError(
                f"no level {name!r}; choose from {', '.join(LEVELS)}, separated by commas."
                f"{did_you_mean(name, LEVELS)}"
            )
    wanted.append(BASELINE)
    return tuple(level for level in LEVELS.values() if level.name in wanted)


@dataclass(frozen=True)
class Stored:
    """Bytes stored between steps, by use, and the number of the model's parameters."""

    params: int
    model: int
    masters: int
    optimizer: int

    @property
    def bytes(self) -> int:
        """Bytes in total."""
        return self.model + self.masters + self.optimizer

    @property
    def per_param(self) -> float:
        """Bytes per parameter, in total."""
        return self.bytes / max(self.params, 1)


@dataclass(frozen=True)
class Training:
    """One level's training.

    Attributes:
        losses: One per step.
        loss_scales: Before the first step, then after each.
        stored: Bytes between steps.
        frozen: Largest share of the weights whose nonzero update was lost to rounding, over a few
            steps; ``None`` if it cannot be measured.
        saved_bytes: Bytes that autograd saved for the first backward pass, not counting weights.
        peak_bytes: Peak memory allocated on CUDA; ``None`` elsewhere.
        evaluation: Result of the target's ``evaluate``.
    """

    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    stored: Stored
    frozen: float | None
    saved_bytes: int
    peak_bytes: int | None
    evaluation: float | None = None

    @property
    def skipped(self) -> int:
        """Number of steps that overflowed, each of which lowered the loss scale."""
        pairs = itertools.pairwise(self.loss_scales)
        return len([after for before, after in pairs if after < before])


@dataclass(frozen=True)
class Result:
    """The results of one level; a part that failed is missing.

    Attributes:
        level: The level.
        emulated: Says that the CPU emulates the level's dtype, so that its time tells nothing
            about other machines and is not measured; empty if it does not.
        skipped: Why the level was not trained; empty if it was.
        training: Record of the training.
        times: Milliseconds of each timed step.
        errors: Messages of the parts that failed.
    """

    level: Level
    emulated: str = ""
    skipped: str = ""
    training: Training | None = None
    times: tuple[float, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The level's name."""
        return self.level.name

    @property
    def has_diverged(self) -> bool:
        """Whether the final loss is not finite."""
        return self.training is not None and not math.isfinite(self.training.losses[-1])

    @property
    def milliseconds(self) -> float:
        """Median time per step; 0 if it was not timed."""
        return median(self.times or [0.0])

    @property
    def memory(self) -> int:
        """Peak bytes on CUDA; elsewhere bytes stored and saved for backward. 0 if unknown."""
        record = self.training
        if record is None:
            return 0
        if record.peak_bytes:
            return record.peak_bytes
        return record.stored.bytes + record.saved_bytes


Word = Literal["use", "ties", "usable", "unclear", "no", "skipped", "baseline"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one level.

    Attributes:
        level: The level.
        word: "use" for the recommended level, "ties" if it is equally fast, "usable" if it trains
            as well as fp32 but gains less or is emulated, "unclear" if the measurements do not
            decide, "no" if it is ruled out, "skipped" if it was not trained, "baseline" for fp32.
        why: The reason, with the measurement.
    """

    level: str
    word: Word
    why: str


@dataclass(frozen=True)
class Recommendation:
    """The recommended level.

    Attributes:
        level: The level; "O0" to stay in fp32, ``None`` without a verdict.
        text: The recommendation on speed, then a colon and the reason.
        ties: The other levels that gain as much.
        quality: Which levels train as well as fp32, and which do not; empty if that is unknown.
        verdicts: One for each level, in display order.
    """

    level: str | None
    text: str
    ties: tuple[str, ...] = ()
    quality: str = ""
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Every level's result.

    Attributes:
        target: As named by the user.
        machine: Description of the machine.
        steps: Training steps of each level.
        seed: Seed of all random numbers.
        results: In display order; the first is the fp32 baseline.
        load: Load of the machine while the levels were timed.
        notes: Remarks for the reader.
        recommendation: Derived from the results.
    """

    target: str
    machine: str
    steps: int
    seed: int
    results: tuple[Result, ...]
    load: Load
    notes: tuple[str, ...]
    recommendation: Recommendation = Recommendation(None, "")

    @property
    def baseline(self) -> Result:
        """The fp32 run."""
        return self.results[0]

    @property
    def failed(self) -> bool:
        """Whether something failed at any level."""
        return any(result.errors for result in self.results)

    def speed(self, result: Result, other: Result | None = None) -> Interval | None:
        """Returns a speed relative to ``other``, by default fp32.

        ``None`` without enough times, or if the machine was busy.
        """
        if self.load.busy:
            return None
        base = other or self.baseline
        return speed_of(result.times, base.times)


def to_json(comparison: Comparison) -> Any:
    """Returns ``comparison`` as plain data, with None for NaN and infinity, which JSON lacks."""
    levels = []
    for result in comparison.results:
        level = {
            **vars(result),
            "level": result.name,
            "meaning": result.level.meaning,
            "dtype": dtypes.name(result.level.dtype),
            "speed": comparison.speed(result),
        }
        levels.append(level)
    data = {"format": "apex-compare/5", **vars(comparison), "levels": levels}
    del data["results"]
    return json_types(data)
