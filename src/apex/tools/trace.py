"""``trace``: runs a script and names the first operator that made inf or NaN."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from apex.debug.faults import Fault
from apex.debug.overflow import hit_lines
from apex.debug.script_trace import ScriptTrace
from apex.tools.script import Ending, Script


@dataclass(frozen=True)
class Tracing:
    """What the trace of a script found.

    Attributes:
        script: Name of the script or module.
        ending: How the script ended.
        first: The first fault; None without one.
        steps_before: Number of optimizer steps before it; all of them without a fault.
        certain: Whether the fault reached a gradient, the loss or a weight.
        gradients: Names of parameters that received a non-finite gradient.
        operators: Number of operators traced.
        steps: Number of optimizer steps completed.
        passes: Number of backward passes.
        healed: Number of these after which a dynamic loss scale backed off.
        harmless: Number of operators whose inf and NaN reached no gradient.
        first_harmless: The first of these, in one line; ``""`` without one.
        compiled: Whether a compiled model ran uncompiled.
        seconds: Time the script took from its first operator on.
        own_seconds: Time of this that tracing took.
        rank: Rank among several processes; None for a single one.
    """

    script: str
    ending: Ending
    first: Fault | None
    steps_before: int
    certain: bool
    gradients: tuple[str, ...]
    operators: int
    steps: int
    passes: int
    healed: int
    harmless: int
    first_harmless: str
    compiled: bool
    seconds: float
    own_seconds: float
    rank: int | None

    @property
    def slowdown(self) -> float:
        """How many times as long ``seconds`` are as they would have been without the trace."""
        without = self.seconds - self.own_seconds
        return self.seconds / without if without > 0.0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns everything in JSON types."""
        first = None if self.first is None else self.first.as_dict()
        return {**asdict(self), "first": first, "slowdown": self.slowdown}


class FaultFound(BaseException):
    """Ends a traced script; no ``except Exception`` catches it, and each ``finally`` runs."""


def trace(script: Script, *, notify: Callable[[Fault], None] | None = None) -> Tracing | None:
    """Runs a script under a trace; returns what it found, or None in a forked copy of the process.

    Args:
        script: What to run.
        notify: Called with the first fault once it is certain, after which the script runs on;
            None stops the script there.
    """
    process = os.getpid()

    def on_fault() -> None:
        if notify is None:
            raise FaultFound
        if found.first is not None:
            notify(found.first)

    with ScriptTrace(on_fault=on_fault) as found:
        ending = script.run(stop=FaultFound)
    seconds = found.seconds
    if os.getpid() != process:  # the script called os.fork, and the child returned here
        return None
    return Tracing(
        script=script.name,
        ending=ending,
        first=found.first,
        steps_before=found.steps_before,
        certain=found.is_certain,
        gradients=tuple(found.gradients),
        operators=found.operators,
        steps=found.steps,
        passes=found.passes,
        healed=found.healed,
        harmless=found.harmless,
        first_harmless=_brief(found.first_harmless),
        compiled=found.compiled,
        seconds=seconds,
        own_seconds=found.own_seconds,
        rank=rank(),
    )


def rank() -> int | None:
    """Returns the rank that ``torchrun`` gave this process; None in a run of one process."""
    given = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not all(map(str.isdecimal, given)) or int(given[1]) < 2:
        return None
    return int(given[0])


def tracing_text(tracing: Tracing) -> str:
    """Returns the report; on several ranks, each line begins with the rank."""
    return marked("\n".join([*_verdict(tracing), *_remarks(tracing)]))


def notice_text(fault: Fault) -> str:
    """Returns one line about a fault of a script that runs on."""
    return marked(f"apex trace: {_brief(fault)}; the report follows at the end.")


def marked(text: str) -> str:
    """Returns a text whose lines begin with the rank, if there are several."""
    own = rank()
    return text if own is None else "\n".join(f"[rank {own}] {t}" for t in text.split("\n"))


def _verdict(tracing: Tracing) -> list[str]:
    first = tracing.first
    if first is None:
        return [f"apex trace: {tracing.script} made no inf or NaN that reached its training."]
    lines = [
        f"apex trace: {tracing.script} made {first.kind}, after {_steps(tracing.steps_before)}.",
        f"First overflow: {first}",
        *hit_lines(tracing.gradients),
    ]
    if not tracing.gradients and not tracing.certain:
        lines.append("  hit    no gradient, loss or weight before the script ended")
    return lines


def _remarks(tracing: Tracing) -> list[str]:
    ending = tracing.ending
    lines = []
    if ending.stopped:
        lines.append("The script was stopped there; with --keep-going it runs to its end.")
    elif ending.interrupted:
        lines.append("The script was interrupted; this is what was seen until then.")
    elif ending.error:
        lines.append(f"The script failed: {ending.error}")
    elif ending.status:
        lines.append(f"The script exited with status {ending.status}.")
    if tracing.healed:
        lines.append(
            f"Healthy: {tracing.healed} of {_count(tracing.passes, 'backward pass', 'es')} "
            "overflowed. A dynamic loss scale finds its value this way: it backs off, and the step "
            "is skipped."
        )
    if tracing.harmless:
        lines.append(
            f"Harmless: {_count(tracing.harmless, 'non-finite result')} reached no gradient. The "
            f"first: {tracing.first_harmless}."
        )
    if tracing.compiled:
        lines.append("Compiled parts ran uncompiled, as compiled code is opaque to a trace.")
    if not tracing.operators and not ending.status:
        lines.append(
            "No operator was traced: the script ran none in its own process and main thread. "
            "Trace the program that its processes run."
        )
        return lines
    lines.append(
        f"Traced {_count(tracing.operators, 'operator')} and {_steps(tracing.steps)} in "
        f"{tracing.seconds:.3g} s, about {tracing.slowdown:.1f} times as long as without the trace."
    )
    return lines


def _steps(count: int) -> str:
    return _count(count, "optimizer step")


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def _brief(fault: Fault | None) -> str:
    if fault is None:
        return ""
    where = f" at {fault.location}" if fault.location else ""
    return f"{fault.op} returned {fault.kind}{where}"
