"""``trace``: runs a script, and names what made inf or NaN, lost digits, or held weights still."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from apex.debug.check import FrozenUpdates
from apex.debug.common import counted
from apex.debug.overflow import headed, hit_lines
from apex.debug.place import Finding
from apex.debug.rounding import RoundingTrace
from apex.debug.script_trace import ScriptTrace, Seen
from apex.tools.script import Ending, Script


@dataclass(frozen=True)
class Tracing:
    """What the trace of a script found; ``rank`` is None in a run of one process."""

    script: str
    ending: Ending
    seen: Seen
    rank: int | None

    @property
    def found(self) -> bool:
        """Whether the script made inf or NaN."""
        return self.seen.first is not None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything in JSON types."""
        seen, first = self.seen, self.seen.first
        own = {"script": self.script, "rank": self.rank, "ending": asdict(self.ending)}
        return own | asdict(seen) | {"first": None if first is None else first.as_dict()}

    def __str__(self) -> str:
        """Returns the report; on several ranks, each line begins with the rank."""
        return _marked("\n".join([*_verdict(self), *_remarks(self)]), self.rank)


@dataclass(frozen=True)
class Measuring:
    """What ``--digits`` or ``--updates`` found; ``rank`` is None in a run of one process."""

    script: str
    ending: Ending
    measure: RoundingTrace | FrozenUpdates
    rank: int | None

    @property
    def found(self) -> bool:
        """Whether digits were lost, or weights stood still."""
        return self.measure.worst is not None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything in JSON types."""
        own = {"script": self.script, "rank": self.rank, "ending": asdict(self.ending)}
        data: dict[str, Any] = json.loads(self.measure.to_json())
        return own | data

    def __str__(self) -> str:
        """Returns the report; on several ranks, each line begins with the rank."""
        head = f"apex trace: {self.script}"
        lines = [head, str(self.measure), *_ended(self.ending)]
        return _marked("\n".join(lines), self.rank)


class FaultFound(BaseException):
    """Ends a traced script; no ``except Exception`` catches it, and each ``finally`` runs."""


_STEPS = 10
"""Optimizer steps after which ``--digits`` and ``--updates`` have seen enough."""


def measure(script: Script, *, digits: bool, keep_going: bool) -> Measuring | None:
    """Runs a script's first steps, and says which operators lose digits, or which weights stay.

    With ``keep_going``, the script runs to its end. Returns None in a forked copy of the process.
    """
    process = os.getpid()
    importlib.import_module("torch._dynamo")  # now: what is compiled later runs eagerly, too
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        if isinstance(measuring, FrozenUpdates) and measuring.busy:
            return
        steps += 1
        if steps == _STEPS and not keep_going:
            raise FaultFound

    measuring = RoundingTrace() if digits else FrozenUpdates()
    with measuring:
        hook = register_optimizer_step_post_hook(count)
        try:
            ending = script.run(stop=FaultFound)
        finally:
            hook.remove()
    if os.getpid() != process:
        return None
    return Measuring(script.name, ending, measuring, rank())


def trace(script: Script, *, notify: Callable[[str], None] | None = None) -> Tracing | None:
    """Runs a script under a trace; returns what it found, or None in a forked copy of the process.

    ``notify`` is called with a line about the first fault once it is certain, and the script runs
    on; without it, the script stops there.
    """
    process = os.getpid()

    def on_fault() -> None:
        if notify is None:
            raise FaultFound
        text = f"apex trace: {_brief(found.first)}; the report follows at the end."
        notify(_marked(text, rank()))

    with ScriptTrace(on_fault=on_fault) as found:
        ending = script.run(stop=FaultFound)
    if os.getpid() != process:  # the script called os.fork, and the child returned here
        return None
    return Tracing(script.name, ending, found.seen(), rank())


def rank() -> int | None:
    """Returns the rank that ``torchrun`` gave this process; None in a run of one process."""
    given = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not all(map(str.isdecimal, given)) or int(given[1]) < 2:
        return None
    return int(given[0])


def rank_file(given: str) -> str:
    """Returns a file's absolute path, as the script may change the folder; one for each rank."""
    path, own = Path(given).absolute(), rank()
    return str(path if own is None else path.with_suffix(f".rank{own}{path.suffix}"))


def _marked(text: str, own: int | None) -> str:
    return text if own is None else "\n".join(f"[rank {own}] {t}" for t in text.split("\n"))


_MADE = {
    "inf": "made inf",
    "nan": "made NaN",
    "scaled": "uses gradients before they are unscaled",
}


def _verdict(tracing: Tracing) -> list[str]:
    seen, first = tracing.seen, tracing.seen.first
    if first is None and tracing.ending.error:
        return [f"apex trace: {tracing.script} failed before any inf or NaN reached its training."]
    if first is None:
        return [f"apex trace: {tracing.script} made no inf or NaN that reached its training."]
    lines = [
        f"apex trace: {tracing.script} {_MADE[first.kind]}, after {_steps(seen.steps_before)}.",
        headed(first),
        *hit_lines(seen.gradients),
    ]
    if first.kind != "scaled" and not seen.gradients and not seen.certain:
        lines.append("  hit    no gradient, loss or weight before the script ended")
    return lines


def _remarks(tracing: Tracing) -> list[str]:
    seen = tracing.seen
    ending = tracing.ending
    lines = _ended(ending)
    if seen.healed and seen.first is None:
        state = "Healthy" if seen.healed < seen.passes else "Not settled"
        lines.append(
            f"{state}: {seen.healed} of {counted(seen.passes, 'backward pass', 'es')} "
            "overflowed. A dynamic loss scale finds its value this way: it backs off, and the step "
            "is skipped."
        )
    if not seen.operators:
        none = (
            "No operator was traced: the script ran none in its own process and main thread. "
            "Trace the program that its processes run."
        )
        return lines if ending.status else [*lines, none]
    if seen.first is None and seen.steps:
        lines.append(
            "If the loss stands still, or is higher than in fp32: `apex trace --digits "
            f"{tracing.script}` names operators that lose digits, `--updates` weights that stay."
        )
    operators = counted(seen.operators, "operator")
    return [*lines, f"Traced {operators} and {_steps(seen.steps)} in {seen.seconds:.3g} s."]


def _ended(ending: Ending) -> list[str]:
    """Returns the line on how a script ended; none if it ended by itself."""
    if ending.stopped:
        return ["The script was stopped there; with --keep-going it runs to its end."]
    if ending.interrupted:
        return ["The script was interrupted; this is what was seen until then."]
    if ending.error:
        return [f"The script failed: {ending.error}"]
    return [f"The script exited with status {ending.status}."] if ending.status else []


def _steps(count: int) -> str:
    return counted(count, "optimizer step")


def _brief(fault: Finding | None) -> str:
    if fault is None:
        return ""
    where = f" at {fault.location}" if fault.location else ""
    return f"{fault.op} {_MADE[fault.kind]}{where}"
