"""The recommended level, the verdict on every other, and the measurements behind them.

Note [Verdict on speed]
    The levels take turns, so that a round holds one step of each. A level's speed is the median
    over rounds of fp32's time divided by its own, with the interval of :mod:`.timing`. It is faster
    if the median is at least ``LEAST_GAIN`` and the interval lies above 1; not faster if the median
    is less than ``LEAST_GAIN`` and the interval ends below ``MOST_MISSED``. Anything else is
    unclear. Contention costs a fixed time per parallel region, which no pairing cancels, so a busy
    machine gives no verdict at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apex.debug.common import counted
from apex.tools.compare.results import BASELINE, Comparison, Recommendation, Result, Verdict, Word
from apex.tools.compare.soundness import LEAST_STEPS, excess, fault
from apex.tools.compare.timing import LEAST_ROUNDS, Interval
from apex.tools.compare.training import end_loss

LEAST_GAIN = 1.05
"""Least speed-up that justifies a change of numerics."""

MOST_MISSED = 1.1
"""Largest speed-up that a decision for fp32 may miss."""

LEAST_BYTES_SAVED = 32e6
"""Least saving of memory that justifies a change of numerics at the same speed."""

LEAST_BYTES_MENTIONED = 1e6
"""Savings below this do not count as less memory, whatever their share."""

LEAST_MEMORY_GAIN = 0.9
"""Largest share of fp32's memory that counts as less."""


@dataclass(frozen=True)
class _Timed:
    """A level that was timed, its speed relative to fp32, and fp32's result."""

    result: Result
    speed: Interval
    base: Result

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def is_faster(self) -> bool | None:
        """Whether it is faster, None if that is unclear; see Note [Verdict on speed]."""
        if self.speed.median >= LEAST_GAIN:
            return True if self.speed.low > 1 else None
        return False if self.speed.high < MOST_MISSED else None

    @property
    def saved(self) -> int:
        """The bytes that it saves if they are worth mentioning; otherwise 0."""
        ours, fp32 = self.result.memory, self.base.memory
        if not 0 < ours <= LEAST_MEMORY_GAIN * fp32:
            return 0
        return fp32 - ours if fp32 - ours >= LEAST_BYTES_MENTIONED else 0

    @property
    def gains(self) -> bool:
        """Whether it is faster than fp32, or much smaller and no slower."""
        no_slower = self.is_faster is False and self.speed.median >= 1 / LEAST_GAIN
        return bool(self.is_faster) or (no_slower and self.saved >= LEAST_BYTES_SAVED)

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
        """A key that sorts the simplest of equally fast levels first."""
        return not self.result.level.casts, self.result.level.dtype is torch.float16


def recommendation(comparison: Comparison) -> Recommendation:
    """Returns the fastest level that trains as well as fp32, or fp32, or no verdict."""
    base = comparison.baseline
    if base.training is None:
        return Recommendation(None, "No recommendation: the fp32 baseline failed.", base.errors)
    if not math.isfinite(base.training.losses[-1]):
        text = (
            "No recommendation: the final loss is not finite in fp32 either. Run `apex trace` on "
            "your training script: it names the operator."
        )
        return Recommendation(None, text, base.errors)
    if len(comparison.results) == 1:
        return Recommendation(None, "Nothing to compare: only fp32 was trained.")
    refusals = {r.name: r.skipped or fault(r, base) for r in comparison.results}
    timed = {}
    for result in comparison.results:
        speed = comparison.speed(result)
        if speed is not None:
            timed[result.name] = _Timed(result, speed, base)
    judged = _judged(comparison, refusals, timed)
    verdicts = []
    for result in comparison.results:
        refused = refusals[result.name]
        word, why = _word(comparison, result, timed.get(result.name), judged, refused)
        verdicts.append(Verdict(result.name, word, why))
    reasons = _grouped(refusals)
    if judged.alike:
        reasons = [*_reasons(judged.alike[0].result, base), *reasons]
    sound = [verdict.level for verdict in verdicts if verdict.word == "unclear"]
    if judged.level is None and sound and comparison.steps >= LEAST_STEPS:
        reasons.append(f"Trains as well as fp32: {', '.join(sound)}.")
    return Recommendation(judged.level, judged.text, tuple(reasons), tuple(verdicts))


@dataclass(frozen=True)
class _Judged:
    """The recommended level, its text, and the levels that gain most, the recommended one first."""

    level: str | None
    text: str
    alike: Sequence[_Timed] = ()


def _judged(
    comparison: Comparison, refusals: Mapping[str, str], timed: Mapping[str, _Timed]
) -> _Judged:
    usable = [r for r in comparison.results if r.level.advised and not refusals[r.name]]
    text = _undecidable(comparison) if usable else ""
    if text:
        return _Judged(None, text)
    sound = [timed[result.name] for result in usable if result.name in timed]
    gaining = [candidate for candidate in sound if candidate.gains]
    unclear = [candidate for candidate in sound if candidate.is_faster is None]
    if gaining:
        alike = _fastest_and_ties(gaining, comparison)
        best = min(alike, key=lambda candidate: candidate.preference)
        alike.remove(best)
        return _Judged(best.name, _use(best, alike), [best, *alike])
    if unclear:
        best = _fastest(unclear)
        rounds = len(best.result.timing.samples) if best.result.timing else 0
        return _Judged(
            None,
            f"No verdict on speed: the times vary too much ({comparison.load}). {best.name} looked "
            f"{', '.join(best.facts)}. Run again with --rounds {4 * rounds}.",
        )
    return _Judged(BASELINE, _stay(sound))


def _undecidable(comparison: Comparison) -> str:
    """Returns why nothing measured can decide, and what to do; empty if it can."""
    timing = comparison.baseline.timing
    rounds = 0 if timing is None else len(timing.samples)
    speed = "No verdict on speed"
    if comparison.load.busy:
        return f"{speed}: this machine is busy ({comparison.load}). Run again when it is idle."
    if timing is None:
        return f"{speed}: fp32 was not timed. Run again with fewer --levels."
    if rounds < LEAST_ROUNDS:
        few = f"{counted(rounds, 'timed step')} per level {'is' if rounds == 1 else 'are'} too few"
        return f"{speed}: {few}. Run again with --rounds 20."
    if comparison.steps < LEAST_STEPS:
        steps = counted(comparison.steps, "step")
        return f"No verdict on training: {steps} cannot judge training. Run again with --steps 100."
    return ""


def _fastest(candidates: Sequence[_Timed]) -> _Timed:
    return max(candidates, key=lambda candidate: candidate.speed.median)


def _fastest_and_ties(candidates: Sequence[_Timed], comparison: Comparison) -> list[_Timed]:
    """Returns the fastest level and those that are as fast, within the spread."""
    fastest = _fastest(candidates)
    alike = []
    for candidate in candidates:
        lead = comparison.speed(fastest.result, candidate.result)
        if lead is None or lead.median < LEAST_GAIN or lead.low <= 1:
            alike.append(candidate)
    return alike


def _use(best: _Timed, ties: Sequence[_Timed]) -> str:
    facts = best.facts if best.is_faster else best.facts[::-1]
    gain = ", ".join([*facts, "and a final loss within the noise of fp32"])
    text = f"Use {best.name} ({best.result.level.meaning}): {gain}."
    if not ties:
        return text
    text += f" Equally fast within the spread: {', '.join(map(_prose, ties))}."
    same = [candidate for candidate in ties if candidate.preference == best.preference]
    return text + (f" A script that uses {_prose(same[0])} can keep it." if same else "")


def _prose(candidate: _Timed) -> str:
    level = candidate.result.level
    if not level.autocast:
        return level.name
    return "torch.autocast" + " in fp16" * (level.dtype is torch.float16)


def _stay(sound: Sequence[_Timed]) -> str:
    """Returns the advice to stay in fp32, and why no level gains."""
    if not sound:
        return "Stay in fp32: no other level is usable on this machine."
    best = _fastest(sound)
    facts = ", ".join(best.facts)
    return f"Stay in fp32: {best.name}, the fastest usable level, is {facts}."


def _word(
    comparison: Comparison, result: Result, timed: _Timed | None, judged: _Judged, refused: str
) -> tuple[Word, str]:
    """Returns the verdict on a level in one word, and the reason."""
    if result.name == BASELINE:
        stays = judged.level == BASELINE
        return ("use", "no other level gains") if stays else ("baseline", "the others' baseline")
    if refused:
        return "skipped" if result.skipped else "no", refused
    facts = "not timed" if timed is None else ", ".join(timed.facts)
    if not result.level.advised:
        return "no", f"{facts}; no fp32 masters, for comparison only"
    if judged.level is None or timed is None:
        if comparison.load.busy:
            facts = "no speed, as the machine is busy"
        enough = comparison.steps >= LEAST_STEPS
        return "unclear", f"trains as well as fp32; {facts}" if enough else facts
    if result.name == judged.level:
        return "use", facts
    if timed in judged.alike:
        return "ties", facts
    if timed.is_faster is None:
        return "unclear", f"{facts}; the times do not tell"
    more = f"{judged.level} gains more" if judged.alike else "no gain"
    return "usable", f"{facts}; {more}"


def _grouped(refusals: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with the names of the levels it applies to."""
    names: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(who)}: {why.rstrip('.')}." for why, who in names.items() if why]


def _reasons(best: Result, base: Result) -> list[str]:
    if not (best.timing and base.timing and best.training and base.training):
        return []
    ours, fp32 = best.training, base.training
    loss = f"{end_loss(ours.losses):.4g}, against {end_loss(fp32.losses):.4g} in fp32"
    return [
        f"Time: {best.timing.median:.3g} ms a step, against {base.timing.median:.3g} ms in fp32.",
        f"Final loss: {loss}; {excess(ours.losses, fp32.losses)}.",
        f"Stored: {ours.stored.per_param:.1f} bytes per parameter, against "
        f"{fp32.stored.per_param:.1f}.",
    ]


def megabytes(count: int) -> str:
    """Returns bytes as megabytes, or as kilobytes below 0.1 MB."""
    value = count / 1e6
    if value < 0.1:
        return f"{count / 1e3:.1f} kB"
    return f"{value:.0f} MB" if value >= 100 else f"{value:.1f} MB"
