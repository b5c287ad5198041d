"""What a comparison found: frozen values, and the same as plain data for JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from apex._core import dtypes
from apex.tools.variants import BASELINE, Variant

Sample = tuple[int, float]
"""A step, counted from 1, and what was measured there."""


@dataclass(frozen=True)
class Stored:
    """Bytes that live between two steps.

    Attributes:
        params: How many parameters the model has.
        model: Bytes of the model's parameters.
        masters: Bytes of fp32 masters.
        optimizer: Bytes of the optimizer's state.
    """

    params: int
    model: int
    masters: int
    optimizer: int

    @property
    def per_param(self) -> float:
        """Bytes per parameter, all of them together."""
        return (self.model + self.masters + self.optimizer) / max(self.params, 1)


@dataclass(frozen=True)
class Distance:
    """How far a trained model is from the fp32 one after as many steps from the same start.

    Attributes:
        steps: After which both are compared.
        weights: Norm of the difference over the norm of the fp32 weights.
        loss: Difference over the fp32 loss, both the mean of the last steps.
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
        frozen: Share of the weights that did not move though their update was not zero, at some
            steps; empty where it cannot be measured.
        stored: Between two steps.
        peak_bytes: Most that was allocated on the device; ``None`` where it is not measured.
        distance: From fp32; ``None`` without an fp32 run.
        evaluation: What the target's ``evaluate`` returned.
    """

    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    frozen: tuple[Sample, ...]
    stored: Stored
    peak_bytes: int | None = None
    distance: Distance | None = None
    evaluation: float | None = None

    @property
    def skipped(self) -> tuple[int, ...]:
        """Steps, counted from 1, that overflowed: there the loss scale fell."""
        pairs = itertools.pairwise(self.loss_scales)
        return tuple(step for step, (old, new) in enumerate(pairs, start=1) if new < old)


@dataclass(frozen=True)
class Timing:
    """Milliseconds per training step, of steps that all variants took in turns.

    Attributes:
        median: Half of the steps took less.
        low: A quarter of the steps took less.
        high: A quarter of the steps took more.
        steps: How many were timed.
    """

    median: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class ModuleError:
    """How far one module's output is from that of fp32.

    Attributes:
        name: Qualified name in the model; ``""`` for the model itself.
        kind: The module's class.
        error: Norm of the difference over the norm of the fp32 output.
    """

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class Probe:
    """One forward and backward pass beside fp32, from the same weights on the same batch.

    Attributes:
        compute_dtype: The lowest floating dtype that a module put out, as "float16".
        modules: Every module without children, in the order of the forward, then the model.
        eps: The relative rounding step of the variant's dtype.
        underflow: Share of the gradients that are zero here and not in fp32.
        activation_bytes: What autograd kept for the backward pass, weights not counted.
    """

    compute_dtype: str
    modules: tuple[ModuleError, ...]
    eps: float
    underflow: float
    activation_bytes: int

    @property
    def first_divergence(self) -> ModuleError | None:
        """The first module whose output is further from fp32 than ``eps``."""
        return next((module for module in self.modules if module.error > self.eps), None)


@dataclass(frozen=True)
class Result:
    """All that was found of one variant; a part is ``None`` where it failed.

    Attributes:
        variant: Which.
        slowdown: Time of a matrix product in its dtype over that in fp32; ``None`` where this
            machine has no such product.
        emulated: Whether the machine has no arithmetic of its own for the dtype.
        training: The whole training.
        timing: Time per step.
        probe: One pass beside fp32.
        errors: What failed, in words.
    """

    variant: Variant
    slowdown: float | None = 1.0
    emulated: bool = False
    training: Training | None = None
    timing: Timing | None = None
    probe: Probe | None = None
    errors: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.variant.name


@dataclass(frozen=True)
class Recommendation:
    """Which level to use.

    Attributes:
        level: "O0" to stay in fp32.
        text: In one sentence.
        reasons: One sentence each, with the figures.
    """

    level: str
    text: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Every variant's result.

    Attributes:
        target: As named by the user.
        machine: What it ran on, in words.
        steps: Training steps of a variant that is not emulated.
        seed: Of all random numbers.
        results: In the order to show, the fp32 baseline first.
        notes: What the reader should know.
        recommendation: Made from the results.
    """

    target: str
    machine: str
    steps: int
    seed: int
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    recommendation: Recommendation = field(default=Recommendation(BASELINE, "", ()))

    @property
    def baseline(self) -> Result:
        """The fp32 run."""
        return next(result for result in self.results if result.name == BASELINE)

    @property
    def failed(self) -> tuple[Result, ...]:
        """Those of which something failed."""
        return tuple(result for result in self.results if result.errors)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Returns ``comparison`` as plain data: JSON has no NaN or infinity, so None for these."""
    data = {name: value for name, value in asdict(comparison).items() if name != "results"}
    results = [_result_data(result) for result in comparison.results]
    return {"format": "apex-compare/1", **_plain(data), "levels": _plain(results)}


def _result_data(result: Result) -> dict[str, Any]:
    data = {name: value for name, value in asdict(result).items() if name != "variant"}
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, torch.dtype):
        return dtypes.name(value)
    return value
