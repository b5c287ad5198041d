"""The recommended level, the verdict on every other, and the measurements behind them.

Note [Verdict on speed]
    The variants take turns, so that a round holds one step of each under the same load. A
    variant's speed is the median over rounds of fp32's time divided by its own, with the interval
    of :mod:`apex.tools.paired`. It is faster if the median is at least ``LEAST_GAIN`` and the
    interval lies above 1; not faster if the median is less than ``LEAST_GAIN`` and the interval
    ends below ``MOST_MISSED``. Anything else is unclear, and a comparison in which no variant is
    faster and one is unclear has no verdict on speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from apex.debug.rendering.formatting import counted
from apex.tools.load import why_times_spread
from apex.tools.paired import LEAST_ROUNDS, Interval
from apex.tools.results import Comparison, Recommendation, Result, Verdict, Word
from apex.tools.rows import megabytes
from apex.tools.soundness import noise, refusal
from apex.tools.training import end_loss
from apex.tools.variants import BASELINE

LEAST_GAIN = 1.05
"""Least speed-up that justifies a change of numerics."""

MOST_MISSED = 1.1
"""Largest speed-up that a decision for fp32 may miss."""

LEAST_BYTES_SAVED = 32e6
"""Least saving of memory that justifies a change of numerics at the same speed."""

LEAST_MEMORY_GAIN = 0.9
"""Largest share of fp32's memory that counts as less."""

LEAST_BYTES_MENTIONED = 1e6
"""Savings below this do not count as less memory, whatever their share."""

ENOUGH_ROUNDS = 20

_FP32_NOT_FINITE = (
    "No recommendation: the final loss is not finite in fp32 either. "
    "amp.debug.trace_overflow(model) around a step names the operator."
)

MEASURE = "what the others are measured against"


class Outcome(Enum):
    """What the times say of a variant."""

    FASTER = "faster"
    NOT_FASTER = "not faster"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class _Timed:
    """A variant that was timed, its speed relative to fp32, and fp32's result."""

    result: Result
    speed: Interval
    base: Result

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def outcome(self) -> Outcome:
        """What its speed says; see Note [Verdict on speed]."""
        if self.speed.median >= LEAST_GAIN:
            return Outcome.FASTER if self.speed.low > 1 else Outcome.UNCLEAR
        return Outcome.NOT_FASTER if self.speed.high < MOST_MISSED else Outcome.UNCLEAR

    @property
    def saved(self) -> int:
        """The bytes that it saves if they are worth mentioning; otherwise 0."""
        measured = {
            r.training is not None and r.training.peak_bytes is not None
            for r in (self.result, self.base)
        }
        ours, fp32 = self.result.memory, self.base.memory
        if len(measured) > 1 or not 0 < ours <= LEAST_MEMORY_GAIN * fp32:
            return 0
        return fp32 - ours if fp32 - ours >= LEAST_BYTES_MENTIONED else 0

    @property
    def gains(self) -> bool:
        """Whether it is faster than fp32, or much smaller and no slower."""
        no_slower = self.outcome is Outcome.NOT_FASTER and self.speed.median >= 1 / LEAST_GAIN
        return self.outcome is Outcome.FASTER or (no_slower and self.saved >= LEAST_BYTES_SAVED)

    @property
    def facts(self) -> list[str]:
        """Its speed and, such as ``"40 % less memory (1.2 GB)"``, what it saves if it does."""
        facts = [str(self.speed)]
        if self.saved:
            share = self.saved / self.base.memory
            facts.append(f"{share:.0%} less memory ({megabytes(self.saved)})")
        return facts

    @property
    def preference(self) -> tuple[bool, bool]:
        """A key that sorts the simplest of equally fast variants first."""
        variant = self.result.variant
        return not variant.fp32_weights, variant.dtype is torch.float16


def recommendation(comparison: Comparison) -> Recommendation:
    """Returns the fastest variant that trains as well as fp32, or fp32, or no verdict."""
    base = comparison.baseline
    if base.training is None:
        return Recommendation(None, "No recommendation: the fp32 baseline failed.", base.errors)
    if not math.isfinite(base.training.losses[-1]):
        return Recommendation(None, _FP32_NOT_FINITE, base.errors)
    if len(comparison.results) == 1:
        return Recommendation(None, "Nothing to compare: only fp32 was trained.")
    if base.timing is None:
        return Recommendation(None, "No verdict on speed: fp32 was not timed.", base.errors)
    refusals = {result.name: refusal(result, comparison) for result in comparison.results}
    timed = {
        result.name: _Timed(result, speed, base)
        for result in comparison.results
        if (speed := comparison.speed(result)) is not None
    }
    sound = [
        each for each in timed.values() if each.result.variant.advised and not refusals[each.name]
    ]
    gaining = [each for each in sound if each.gains]
    unclear = [each for each in sound if each.outcome is Outcome.UNCLEAR]
    level: str | None = None
    ties: list[_Timed] = []
    reasons = _grouped(refusals)
    if gaining:
        alike = _fastest_and_ties(gaining, comparison)
        best = min(alike, key=lambda each: each.preference)
        ties = [each for each in alike if each is not best]
        level, text = best.name, _use(best, ties)
        reasons = [*_reasons(best.result, base), *reasons]
    elif unclear:
        text = _no_verdict(_fastest(unclear), comparison)
    else:
        level, text = BASELINE, _stay(sound)
    verdicts = [
        Verdict(result.name, *_word(result, timed.get(result.name), level, ties, refused))
        for result, refused in zip(comparison.results, refusals.values(), strict=True)
    ]
    return Recommendation(level, text, tuple(reasons), tuple(verdicts))


def _fastest(candidates: Sequence[_Timed]) -> _Timed:
    return max(candidates, key=lambda each: each.speed.median)


def _fastest_and_ties(candidates: Sequence[_Timed], comparison: Comparison) -> list[_Timed]:
    """Returns the fastest variant and those that are as fast, within the spread."""
    fastest = _fastest(candidates)
    leads = [(each, comparison.speed(fastest.result, each.result)) for each in candidates]
    return [
        each for each, lead in leads if lead is None or lead.median < LEAST_GAIN or lead.low <= 1
    ]


def _use(best: _Timed, ties: Sequence[_Timed]) -> str:
    facts = best.facts if best.outcome is Outcome.FASTER else best.facts[::-1]
    gain = ", ".join([*facts, "and a final loss within the noise of fp32"])
    return f"Use {best.name} ({best.result.variant.meaning}): {gain}." + _ties_text(best, ties)


def _ties_text(best: _Timed, ties: Sequence[_Timed]) -> str:
    """Returns who ties and why ``best`` is named; empty if it is alone."""
    if not ties:
        return ""
    (stored, scaled), whys = best.preference, []
    if not stored and any(each.preference[0] for each in ties):
        whys.append("its weights stay fp32")
    if not scaled and any(each.preference[1] for each in ties):
        whys.append("bf16 needs no loss scale")
    same = [each for each in ties if each.preference == best.preference]
    text = f" Equally fast within the spread: {', '.join(map(_prose, ties))}."
    if whys:
        text += f" {best.name} is named because {' and '.join(whys)}."
    if same:
        text += f" A script that uses {_prose(same[0])} can keep it."
    return text


def _prose(candidate: _Timed) -> str:
    variant = candidate.result.variant
    if variant.engine == "amp":
        return variant.name
    return "torch.autocast" + " in fp16" * (variant.dtype is torch.float16)


def _word(
    result: Result, timed: _Timed | None, level: str | None, ties: Sequence[_Timed], refused: str
) -> tuple[Word, str]:
    """Returns the verdict on a variant in one word, and the reason."""
    if result.name == BASELINE:
        return ("use", "no other level gains") if level == BASELINE else ("baseline", MEASURE)
    if refused:
        return "skipped" if result.skipped else "no", refused
    if timed is None:
        return "unclear", "not timed"
    facts = ", ".join(timed.facts)
    if not result.variant.advised:
        return "no", f"{facts}; no fp32 masters, for comparison only"
    if result.name == level:
        return "use", facts
    if timed in ties:
        return "ties", facts
    if timed.outcome is Outcome.UNCLEAR:
        return "unclear", f"{facts}; the times do not tell"
    return "usable", facts + ("; no gain" if level in (None, BASELINE) else f"; {level} gains more")


def _grouped(refusals: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with the names of the levels it applies to."""
    names: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        if reason:
            names.setdefault(reason, []).append(name)
    return [f"{', '.join(who)}: {reason.rstrip('.')}." for reason, who in names.items()]


def _no_verdict(best: _Timed, comparison: Comparison) -> str:
    """Returns why the times decide nothing, what they look like, and what to do."""
    timing = best.result.timing
    rounds = 0 if timing is None else len(timing.samples)
    if rounds < LEAST_ROUNDS:
        why = f"{counted(rounds, 'timed step')} per level {'is' if rounds == 1 else 'are'} too few"
        again = f"Run again with --rounds {ENOUGH_ROUNDS}."
    else:
        why = why_times_spread(comparison.load)
        again = f"Run again when it is idle, or with --rounds {4 * rounds}."
    looked = f"{best.name} looked {', '.join(best.facts)}"
    return f"No verdict on speed: {why}. {looked}. {again}"


def _stay(sound: Sequence[_Timed]) -> str:
    """Returns the advice to stay in fp32, and why no variant gains."""
    if not sound:
        return "Stay in fp32: no other level is usable on this machine."
    best = _fastest(sound)
    facts = ", ".join(best.facts)
    return f"Stay in fp32: {best.name}, the fastest usable level, is {facts}."


def _reasons(best: Result, base: Result) -> list[str]:
    reasons = [f"Time: {_time(best)} a step, against {_time(base)} in fp32."]
    if best.training is not None and base.training is not None:
        losses = base.training.losses
        reasons.append(
            f"Final loss: {end_loss(best.training.losses):.4g}, against "
            f"{end_loss(losses):.4g} in fp32 (standard deviation {noise(losses):.2g})."
        )
        reasons.append(
            f"Stored: {best.training.stored.per_param:.1f} bytes per parameter, against "
            f"{base.training.stored.per_param:.1f}."
        )
    if best.probe is not None and base.probe is not None:
        reasons.append(
            f"Saved for backward: {megabytes(best.probe.activation_bytes)}, against "
            f"{megabytes(base.probe.activation_bytes)}."
        )
    return reasons


def _time(result: Result) -> str:
    timing = result.timing
    return "not timed" if timing is None else f"{timing.median:.3g} ms"
