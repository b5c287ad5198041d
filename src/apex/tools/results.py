"""The results of a comparison, and their form as JSON."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

from apex._core import dtypes
from apex.debug.rendering.files import json_types
from apex.debug.suggestion import Suggestion
from apex.tools.load import Load
from apex.tools.paired import Interval, independent_ratio, paired_ratio
from apex.tools.variants import BASELINE, Variant

Sample = tuple[int, float]
"""A step, counted from 1, and the value measured there."""


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
class Distance:
    """Distance of a trained model from the fp32 one after the same number of steps.

    Attributes:
        steps: Number of steps before the comparison.
        weights: Norm of the difference divided by the norm of the fp32 weights.
        loss: Relative difference of the losses, averaged over the last steps.
    """

    steps: int
    weights: float
    loss: float


@dataclass(frozen=True)
class Training:
    """One variant's training.

    Attributes:
        losses: One per step.
        loss_scales: Before the first step, then after each.
        frozen: Share of the weights whose nonzero update was lost to rounding, at some steps; empty
            if it cannot be measured.
        stored: Bytes between steps.
        peak_bytes: Peak memory allocated; ``None`` if it is not measured.
        peak_from: How: ``"device"``, by CUDA's statistics of the whole training, or ``"events"``,
            by the CPU allocator's in one more iteration.
        distance: Distance from fp32; ``None`` without an fp32 run.
        evaluation: Result of the target's ``evaluate``.
    """

    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    frozen: tuple[Sample, ...]
    stored: Stored
    peak_bytes: int | None = None
    peak_from: Literal["device", "events"] | None = None
    distance: Distance | None = None
    evaluation: float | None = None

    @property
    def skipped(self) -> tuple[int, ...]:
        """Steps, counted from 1, that overflowed, as a fall of the loss scale shows."""
        pairs = itertools.pairwise(self.loss_scales)
        return tuple(step for step, (old, new) in enumerate(pairs, start=1) if new < old)


@dataclass(frozen=True)
class Timing:
    """Milliseconds per training step, measured over interleaved steps of all variants.

    Attributes:
        samples: One per round, at least one.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median."""
        return median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class ModuleError:
    """Distance of one module's output from fp32.

    Attributes:
        name: Qualified name in the model; ``""`` for the model itself.
        kind: The module's class.
        error: Norm of the difference divided by the norm of the fp32 output.
    """

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class Probe:
    """One forward and backward pass compared with fp32, from the same weights on the same batch.

    Attributes:
        compute_dtype: The narrowest floating dtype of any module's output, such as "float16".
        modules: Leaf modules in forward order, then the model.
        eps: Relative rounding step of the variant's dtype.
        underflow: Share of the gradients that are zero here but not in fp32.
        activation_bytes: Bytes that autograd saved for backward, not counting weights.
    """

    compute_dtype: str
    modules: tuple[ModuleError, ...]
    eps: float
    underflow: float
    activation_bytes: int

    @property
    def first_divergence(self) -> ModuleError | None:
        """The first module whose output differs from fp32 by more than ``eps``."""
        return next((module for module in self.modules if module.error > self.eps), None)


@dataclass(frozen=True)
class Result:
    """The results of one variant; a part is ``None`` if it failed.

    Attributes:
        variant: The variant.
        slowdown: Time in its dtype relative to fp32, see :func:`apex.tools.timing.slowdown`;
            ``None`` if this machine does not support the dtype.
        emulated: Whether the machine emulates the dtype.
        training: Record of the training.
        timing: Time per step.
        probe: One pass compared with fp32.
        errors: Messages of what failed.
        skipped: Whether it was not trained because its dtype is emulated.
    """

    variant: Variant
    slowdown: float | None = 1.0
    emulated: bool = False
    training: Training | None = None
    timing: Timing | None = None
    probe: Probe | None = None
    errors: tuple[str, ...] = ()
    skipped: bool = False

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.variant.name

    @property
    def memory(self) -> int:
        """The peak bytes, or, where they are not measured, those that are known.

        These are the bytes stored between steps and saved for backward; 0 if neither is known.
        """
        if self.training is None or self.probe is None:
            return 0
        known = self.training.stored.bytes + self.probe.activation_bytes
        return known if self.training.peak_bytes is None else self.training.peak_bytes


Word = Literal["use", "ties", "usable", "unclear", "no", "skipped", "baseline"]
"""The verdict on a level in one word."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one level.

    Attributes:
        level: The level.
        word: "use" for the one to use, "ties" if it is equally fast, "usable" if it trains as well
            as fp32 but brings less, "unclear" if the times do not tell, "no" if it is ruled out,
            "skipped" if it was not trained, "baseline" for fp32 unless that is the one to use.
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
        text: The recommendation, the reason after a colon.
        reasons: One sentence each, with measurements.
        verdicts: One for each level, in display order.
    """

    level: str | None
    text: str
    reasons: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Every variant's result.

    Attributes:
        target: As named by the user.
        machine: Description of the machine.
        steps: Training steps of a variant that is not emulated.
        seed: Seed of all random numbers.
        results: In display order, the fp32 baseline first.
        notes: Remarks for the reader.
        suggestions: Modules to keep in fp32, by level; empty if none were searched for.
        interleaved: Whether the variants took turns while they were timed.
        load: Load of the machine while they were timed; ``None`` if it is not reported.
        recommendation: Derived from the results.
    """

    target: str
    machine: str
    steps: int
    seed: int
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    interleaved: bool = True
    load: Load | None = None
    recommendation: Recommendation = field(default=Recommendation(None, ""))

    @property
    def baseline(self) -> Result:
        """The fp32 run."""
        return next(result for result in self.results if result.name == BASELINE)

    @property
    def failed(self) -> tuple[Result, ...]:
        """The variants in which something failed."""
        return tuple(result for result in self.results if result.errors)

    def speed(self, result: Result, other: Result | None = None) -> Interval | None:
        """Returns a speed relative to ``other``, by default fp32; ``None`` if one was not timed."""
        ours, base = result.timing, (other or self.baseline).timing
        if ours is None or base is None:
            return None
        ratio = paired_ratio if self.interleaved else independent_ratio
        return ratio(base.samples, ours.samples)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Returns ``comparison`` as plain data, with None for NaN and infinity, which JSON lacks."""
    data = {name: value for name, value in asdict(comparison).items() if name != "results"}
    results = [_result_data(result, comparison) for result in comparison.results]
    return {"format": "apex-compare/1", **json_types(data), "levels": json_types(results)}


def _result_data(result: Result, comparison: Comparison) -> dict[str, Any]:
    data = {name: value for name, value in asdict(result).items() if name != "variant"}
    speed = comparison.speed(result)
    data["speed"] = None if speed is None else asdict(speed)
    if result.timing is not None:
        data["timing"]["median"] = result.timing.median
    if result.training is not None:
        data["training"]["skipped"] = result.training.skipped
        data["training"]["stored"]["bytes_per_param"] = result.training.stored.per_param
    if result.probe is not None:
        first = result.probe.first_divergence
        data["probe"]["first_divergence"] = None if first is None else asdict(first)
    return {
        "level": result.name,
        "meaning": result.variant.meaning,
        "dtype": dtypes.name(result.variant.dtype),
        **data,
    }
