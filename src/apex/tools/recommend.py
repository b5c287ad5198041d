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
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import torch

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


def outcome(speed: Interval) -> Outcome:
    """Returns what a speed relative to fp32 says; see Note [Verdict on speed]."""
    if speed.median >= LEAST_GAIN:
        return Outcome.FASTER if speed.low > 1 else Outcome.UNCLEAR
    return Outcome.NOT_FASTER if speed.high < MOST_MISSED else Outcome.UNCLEAR


@dataclass(frozen=True)
class _Candidate:
    """A variant that trains as well as fp32, and its speed relative to fp32."""

    result: Result
    speed: Interval

    @property
    def name(self) -> str:
        return self.result.name


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
    sound = [
        _Candidate(result, speed)
        for result in comparison.results
        if result.variant.advised and not refusals[result.name]
        if (speed := comparison.speed(result)) is not None
    ]
    gaining = [each for each in sound if _gains(each, base)]
    unclear = [each for each in sound if outcome(each.speed) is Outcome.UNCLEAR]
    level: str | None = None
    ties: list[_Candidate] = []
    reasons = _grouped(refusals)
    if gaining:
        alike = _fastest_and_ties(gaining, comparison)
        best = min(alike, key=_preference)
        ties = [each for each in alike if each is not best]
        level, text = best.name, _use(best, ties, base)
        reasons = [*_reasons(best.result, base), *reasons]
    elif unclear:
        text = _no_verdict(max(unclear, key=_median), comparison)
    else:
        level, text = BASELINE, _stay(sound, base)
    tied = {each.name for each in ties}
    verdicts = [
        Verdict(result.name, *_word(result, level, tied, refusals[result.name], comparison))
        for result in comparison.results
    ]
    return Recommendation(level, text, tuple(reasons), tuple(verdicts))


def _median(candidate: _Candidate) -> float:
    return candidate.speed.median


def _gains(candidate: _Candidate, base: Result) -> bool:
    """Returns whether a variant is faster than fp32, or much smaller and no slower."""
    found = outcome(candidate.speed)
    smaller = _saving(candidate.result, base) >= LEAST_BYTES_SAVED
    no_slower = found is Outcome.NOT_FASTER and candidate.speed.median >= 1 / LEAST_GAIN
    return found is Outcome.FASTER or (smaller and no_slower)


def _saving(result: Result, base: Result) -> int:
    """Returns the bytes that a variant saves if they are worth mentioning; otherwise 0."""
    measured = {
        r.training is not None and r.training.peak_bytes is not None for r in (result, base)
    }
    if len(measured) > 1 or not 0 < result.memory <= LEAST_MEMORY_GAIN * base.memory:
        return 0
    saved = base.memory - result.memory
    return saved if saved >= LEAST_BYTES_MENTIONED else 0


def _saving_text(result: Result, base: Result) -> str:
    """Returns the saving such as ``"40 % less memory (1.2 GB)"``; empty if there is none."""
    saved = _saving(result, base)
    return f"{saved / base.memory:.0%} less memory ({megabytes(saved)})" if saved else ""


def _fastest_and_ties(candidates: Sequence[_Candidate], comparison: Comparison) -> list[_Candidate]:
    """Returns the fastest variant and those that are as fast, within the spread."""
    fastest = max(candidates, key=_median)
    found = []
    for each in candidates:
        lead = comparison.speed(fastest.result, each.result)
        if lead is None or lead.median < LEAST_GAIN or lead.low <= 1:
            found.append(each)
    return found


def _preference(candidate: _Candidate) -> tuple[bool, bool]:
    """Returns a key that sorts the simplest of equally fast variants first."""
    variant = candidate.result.variant
    return not variant.fp32_weights, variant.dtype is torch.float16


def _use(best: _Candidate, ties: Sequence[_Candidate], base: Result) -> str:
    facts = [str(best.speed), _saving_text(best.result, base)]
    if outcome(best.speed) is not Outcome.FASTER:
        facts.reverse()
    gain = ", ".join([*filter(None, facts), "and a final loss within the noise of fp32"])
    return f"Use {best.name} ({best.result.variant.meaning}): {gain}." + _ties_text(best, ties)


def _ties_text(best: _Candidate, ties: Sequence[_Candidate]) -> str:
    """Returns who ties and why ``best`` is named; empty if it is alone."""
    if not ties:
        return ""
    (stored, scaled), whys = _preference(best), []
    if not stored and any(_preference(each)[0] for each in ties):
        whys.append("its weights stay fp32")
    if not scaled and any(_preference(each)[1] for each in ties):
        whys.append("bf16 needs no loss scale")
    same = [each for each in ties if _preference(each) == _preference(best)]
    text = f" Equally fast within the spread: {', '.join(map(_prose, ties))}."
    if whys:
        text += f" {best.name} is named because {' and '.join(whys)}."
    if same:
        text += f" A script that uses {_prose(same[0])} can keep it."
    return text


def _prose(candidate: _Candidate) -> str:
    variant = candidate.result.variant
    if variant.engine == "amp":
        return variant.name
    return "torch.autocast" + " in fp16" * (variant.dtype is torch.float16)


def _word(
    result: Result, level: str | None, tied: Set[str], refused: str, comparison: Comparison
) -> tuple[Word, str]:
    """Returns the verdict on a variant in one word, and the reason."""
    speed, base = comparison.speed(result), comparison.baseline
    if result.name == BASELINE:
        return ("use", "no other level gains") if level == BASELINE else ("baseline", MEASURE)
    if refused:
        return "skipped" if result.skipped else "no", refused
    if speed is None:
        return "unclear", "not timed"
    facts = ", ".join(filter(None, [str(speed), _saving_text(result, base)]))
    if not result.variant.advised:
        return "no", f"{facts}; no fp32 masters, for comparison only"
    if result.name == level:
        return "use", facts
    if result.name in tied:
        return "ties", facts
    if outcome(speed) is Outcome.UNCLEAR:
        return "unclear", f"{facts}; the times do not tell"
    return "usable", facts + ("; no gain" if level in (None, BASELINE) else f"; {level} gains more")


def _grouped(refusals: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with the names of the levels it applies to."""
    names: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        if reason:
            names.setdefault(reason, []).append(name)
    return [f"{', '.join(who)}: {reason.rstrip('.')}." for reason, who in names.items()]


def _no_verdict(best: _Candidate, comparison: Comparison) -> str:
    """Returns why the times decide nothing, what they look like, and what to do."""
    timing = best.result.timing
    rounds = 0 if timing is None else len(timing.samples)
    if rounds < LEAST_ROUNDS:
        steps = (
            "1 timed step per level is" if rounds == 1 else f"{rounds} timed steps per level are"
        )
        why = f"{steps} too few"
        again = f"Run again with --rounds {ENOUGH_ROUNDS}."
    else:
        why = why_times_spread(comparison.load)
        again = f"Run again when it is idle, or with --rounds {4 * rounds}."
    saved = _saving_text(best.result, comparison.baseline)
    looked = f"{best.name} looked {best.speed}" + (f", {saved}" if saved else "")
    return f"No verdict on speed: {why}. {looked}. {again}"


def _stay(sound: Sequence[_Candidate], base: Result) -> str:
    """Returns the advice to stay in fp32, and why no variant gains."""
    if not sound:
        return "Stay in fp32: no other level is usable on this machine."
    best = max(sound, key=_median)
    facts = [
        f"{best.name}, the fastest usable level, is {best.speed}",
        _saving_text(best.result, base),
    ]
    return f"Stay in fp32: {', '.join(filter(None, facts))}."


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
