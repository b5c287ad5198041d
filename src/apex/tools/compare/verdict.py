"""Recommends a level, and gives a verdict on every other with the measurements behind it.

Note [Verdict on speed]
    The levels' steps alternate, so that each round contains one step of every level. A level's
    speed is the median over rounds of fp32's time divided by its own, with the interval of
    :mod:`.timing`. A level is faster if the median is at least ``LEAST_GAIN`` and the interval is
    above 1. Otherwise, it is not faster if the interval ends below ``MOST_MISSED``, and unclear if
    it ends above. Contention costs a fixed time per parallel region, which no pairing cancels.
    Therefore a busy machine gets no verdict on speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from apex.debug.common import counted
from apex.tools.compare.results import BASELINE, Comparison, Recommendation, Result, Verdict, Word
from apex.tools.compare.soundness import LEAST_STEPS, fault
from apex.tools.compare.timing import LEAST_ROUNDS, Interval

LEAST_GAIN = 1.05
"""Least speed-up that justifies a change of numerics."""

MOST_MISSED = 1.1
"""Largest speed-up that a recommendation of fp32 may forgo."""

LEAST_BYTES_SAVED = 32e6
"""Fewest bytes saved that justify a change of numerics at the same speed."""

LEAST_MEMORY_GAIN = 0.9
"""Largest share of fp32's memory that counts as a saving."""

UNTIMED = Interval(0.0, 0.0, math.inf)
"""The speed of a level that was not timed."""


@dataclass(frozen=True)
class _Candidate:
    """A level that is judged.

    Attributes:
        result: The level's result.
        base: The result of fp32.
        reason: Why the level was skipped or is ruled out; empty if neither.
        speed: Its speed relative to fp32.
    """

    result: Result
    base: Result
    reason: str
    speed: Interval

    @property
    def saved(self) -> int:
        """The bytes that it saves; 0 if they are not worth mentioning."""
        level_bytes = self.result.memory
        fp32_bytes = self.base.memory
        if level_bytes > LEAST_MEMORY_GAIN * fp32_bytes:
            return 0
        return fp32_bytes - level_bytes

    @property
    def gains(self) -> bool:
        """Whether it is faster than fp32, or as fast and much smaller; see the note above."""
        if _is_clear(self.speed):
            return True
        is_as_fast = self.speed.median >= 1 / LEAST_GAIN and self.speed.high < MOST_MISSED
        return is_as_fast and self.saved >= LEAST_BYTES_SAVED

    @property
    def facts(self) -> str:
        """Its speed and, if any, the memory it saves, such as ``"40% less memory (1.2 GiB)"``."""
        if self.result.emulated:
            return self.result.emulated
        if self.speed is UNTIMED:
            return "not timed"
        if not self.saved:
            return str(self.speed)
        return f"{self.speed}, {self.saved / self.base.memory:.0%} less memory ({size(self.saved)})"

    def preference(self) -> tuple[bool, bool]:
        """Returns a key that sorts the simplest of equally fast levels first."""
        return not self.result.level.casts, self.result.level.dtype is torch.float16


def recommendation(comparison: Comparison) -> Recommendation:
    """Returns the fastest level that trains as well as fp32, or fp32, or no verdict."""
    base = comparison.baseline
    candidates = []
    for result in comparison.results:
        reason = result.skipped or fault(result, base)
        speed = comparison.speed(result) or UNTIMED
        candidates.append(_Candidate(result, base, reason, speed))
    judged = _judged(comparison, candidates)
    verdicts = []
    for candidate in candidates:
        word, why = _word(comparison, candidate, judged)
        verdicts.append(Verdict(candidate.result.name, word, why))
    quality = _quality(comparison, candidates)
    return replace(judged, quality=quality, verdicts=tuple(verdicts))


def _quality(comparison: Comparison, candidates: Sequence[_Candidate]) -> str:
    """Returns which levels train as well as fp32, and which do not; empty if that is unknown."""
    if comparison.steps < LEAST_STEPS or comparison.baseline.has_diverged:
        return ""
    others = [candidate for candidate in candidates[1:] if not candidate.result.skipped]
    good = [candidate.result.name for candidate in others if not candidate.reason]
    bad = [candidate.result.name for candidate in others if candidate.reason]
    sentences = []
    if good:
        sentences.append(f"Training is as good as in fp32 at {', '.join(good)}.")
    if bad:
        sentences.append(
            f"Training fails, is worse, or loses steps or updates, at {', '.join(bad)}."
        )
    return " ".join(sentences)


def _judged(comparison: Comparison, candidates: Sequence[_Candidate]) -> Recommendation:
    if comparison.baseline.has_diverged:
        return Recommendation(
            None,
            "No recommendation: the final loss is not finite in fp32 either. Run `apex trace` on "
            "your training script: it names the operator.",
        )
    advised = [candidate for candidate in candidates if candidate.result.level.advised]
    fast = [candidate for candidate in advised if not candidate.result.emulated]
    usable = [candidate for candidate in fast if not candidate.reason]
    if usable:
        text = _undecidable(comparison)
        if text:
            return Recommendation(None, text)
    gaining = [candidate for candidate in usable if candidate.gains]
    unclear = [candidate for candidate in usable if candidate.speed.high >= MOST_MISSED]
    if gaining:
        alike = _fastest_and_ties(gaining, comparison)
        best = min(alike, key=_Candidate.preference)
        ties = [candidate.result.name for candidate in alike if candidate is not best]
        text = (
            f"Use {best.result.name} ({best.result.level.meaning}): {best.facts}, and a final loss "
            "within the noise of fp32."
        )
        if ties:
            text += f" Equally fast within the spread: {', '.join(ties)}."
        return Recommendation(best.result.name, text, tuple(ties))
    if unclear:
        best = _fastest(unclear)
        return Recommendation(
            None,
            f"No verdict on speed: the times vary too much ({comparison.load}). {best.result.name} "
            f"looked {best.facts}. Run again with more --rounds.",
        )
    if not usable:
        return Recommendation(
            BASELINE,
            "Stay in fp32: none of the other levels is both fast here and as good. The table says "
            "why.",
        )
    best = _fastest(usable)
    return Recommendation(
        BASELINE, f"Stay in fp32: {best.result.name}, the fastest usable level, is {best.facts}."
    )


def _undecidable(comparison: Comparison) -> str:
    """Returns why the measurements cannot decide, and what to do; empty if they can."""
    rounds = len(comparison.baseline.times)
    if comparison.load.busy:
        return (
            f"No verdict on speed: this machine is busy ({comparison.load}). Run again when it is "
            "idle."
        )
    if rounds < LEAST_ROUNDS or comparison.steps < LEAST_STEPS:
        steps = counted(comparison.steps, "training step")
        return (
            f"No verdict from {steps} and {rounds} timed ones per level. Run again with "
            "--steps 100 --rounds 20."
        )
    return ""


def _is_clear(lead: Interval) -> bool:
    """Returns whether a speed is a gain for certain."""
    return lead.median >= LEAST_GAIN and lead.low > 1


def _fastest(candidates: Sequence[_Candidate]) -> _Candidate:
    return max(candidates, key=lambda candidate: candidate.speed.median)


def _fastest_and_ties(candidates: Sequence[_Candidate], comparison: Comparison) -> list[_Candidate]:
    """Returns the fastest level and those that are as fast, within the spread."""
    fastest = _fastest(candidates)
    alike = []
    for candidate in candidates:
        lead = comparison.speed(fastest.result, candidate.result) or UNTIMED
        if not _is_clear(lead):
            alike.append(candidate)
    return alike


def _word(
    comparison: Comparison, candidate: _Candidate, judged: Recommendation
) -> tuple[Word, str]:
    """Returns the verdict on a level in one word, and the reason."""
    result = candidate.result
    facts = candidate.facts
    if result is comparison.baseline:
        return "use" if judged.level == BASELINE else "baseline", "; ".join(result.errors)
    if candidate.reason:
        return "skipped" if result.skipped else "no", candidate.reason
    if not result.level.advised:
        return "no", f"{facts}; no fp32 masters, for comparison only"
    if comparison.baseline.has_diverged:
        return "unclear", f"{facts}; the final loss of fp32 is not finite"
    if comparison.steps < LEAST_STEPS:
        return "unclear", f"{facts}; too few steps to judge its training"
    if result.name == judged.level:
        return "use", facts
    if result.name in judged.ties:
        return "ties", facts
    is_unclear = judged.level is None and not result.emulated
    return "unclear" if is_unclear else "usable", f"trains as well as fp32; {facts}"


def size(count: float) -> str:
    """Returns bytes in a suitable unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
