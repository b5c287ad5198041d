"""``trace``: runs a script and finds inf and NaN, lost precision, or unchanged weights."""

from __future__ import annotations

import json
import os
import textwrap
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from apex._core.param_groups import params_of
from apex._torch.dispatch_modes import suspend_modes
from apex.debug.check import FrozenUpdates
from apex.debug.common import counted, json_types, listed
from apex.debug.ends import GradientEnds
from apex.debug.overflow import headed, hit_lines
from apex.debug.rounding import RoundingTrace
from apex.tools.script import Ending, FaultFound, Script
from apex.tools.script_trace import ScriptTrace, Seen, trace_threads


@dataclass(frozen=True)
class Tracing:
    """The result of tracing a script.

    Attributes:
        script: The script's name.
        ending: How the script ended.
        has_fault: Whether there was inf or NaN, lost precision, or an unchanged weight.
        lines: The report's lines.
        results: The results in JSON types.
    """

    script: str
    ending: Ending
    has_fault: bool
    lines: list[str]
    results: dict[str, Any]

    @property
    def report(self) -> str:
        """The report as text; on several ranks, each line begins with the rank."""
        return _marked("\n".join(self.lines))

    @property
    def data(self) -> dict[str, Any]:
        """The report in JSON types."""
        ending = vars(self.ending)
        return {"script": self.script, "rank": rank(), "ending": ending, **self.results}


_STEPS = 10
"""Optimizer steps after which ``--digits`` and ``--updates`` end the script."""


def measure(script: Script, *, digits: bool, keep_going: bool) -> Tracing:
    """Runs a script's first steps; reports operators that lose precision, or unchanged weights.

    With ``keep_going``, the script runs to its end.
    """
    steps = 0
    is_finite = True

    def count(optimizer: Optimizer, *_: object) -> None:
        nonlocal steps, is_finite
        if updates.busy:
            return
        steps += 1
        with suspend_modes():
            # sync: a diagnosis
            is_finite = all(weight.isfinite().all() for weight in params_of(optimizer))
        is_main = threading.current_thread() is threading.main_thread()
        if steps >= _STEPS and is_main and not keep_going:
            raise FaultFound

    updates = FrozenUpdates()
    ends = RoundingTrace() if digits else GradientEnds()
    measured: Any = ends if digits else updates
    with ExitStack() as until_end:
        if not digits:
            until_end.enter_context(updates)
        until_end.enter_context(ends)
        trace_threads(ends, until_end)
        until_end.callback(register_optimizer_step_post_hook(count).remove)
        ending = script.run()
    text = str(measured)
    if ends.cut_off and not digits:
        text = ends.cut_off
    lines = [f"apex trace: {script.name}", text]
    if ends.untrained and not ends.cut_off:
        lines.append(f"No step found a gradient other than 0 for {listed(ends.untrained)}.")
    if not is_finite:
        lines.append(
            "The weights hold inf or NaN after the last step, of which these figures say nothing: "
            f"`apex trace {script.name}` names the operator."
        )
    has_fault = bool(measured.worst or ends.cut_off or not is_finite)
    results = json.loads(measured.to_json())
    return Tracing(script.name, ending, has_fault, [*lines, *_ended(ending)], results)


def trace(script: Script, *, keep_going: bool, notify: Callable[[str], None]) -> Tracing:
    """Runs a script under a trace and finds the first fault.

    The script stops once the fault is certain. With ``keep_going``, it runs to its end, and
    ``notify`` is called with a line about the fault.
    """

    def on_fault() -> None:
        if not keep_going:
            raise FaultFound
        fault, _, _ = str(running).partition("\n")
        notify(_marked(f"{fault}; the report follows at the end."))

    with ScriptTrace(on_fault=on_fault) as running:
        ending = script.run()
    seen = running.seen()
    has_fault = seen.first is not None and not seen.harmless
    lines = _verdict(script.name, seen)
    lines += _remarks(script.name, seen, ending)
    return Tracing(script.name, ending, has_fault, lines, json_types(seen))


def rank() -> int | None:
    """Returns the rank that ``torchrun`` gave this process; None in a run of one process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    return int(os.environ.get("RANK", "0"))


def rank_file(name: str) -> str:
    """Returns this rank's own file, as an absolute path, because the script may change folders."""
    path = Path(name).absolute()
    number = rank()
    if number is not None:
        path = path.with_suffix(f".rank{number}{path.suffix}")
    return str(path)


def _marked(text: str) -> str:
    """Returns a text with the rank before each line; in a run of one process, unchanged."""
    number = rank()
    if number is None:
        return text
    return textwrap.indent(text, f"[rank {number}] ")


_MADE = {
    "inf": "made inf",
    "nan": "made NaN",
    "scaled": "uses gradients before they are unscaled",
}


def _verdict(script: str, seen: Seen) -> list[str]:
    first = seen.first
    if not seen.operators:
        return [f"apex trace: {script} ran no operator in its own process."]
    if first is None:
        lines = [f"apex trace: no inf or NaN in {script} reached a gradient, the loss or a weight."]
        if seen.aside is not None:
            lines.append("One was unused, as in an evaluation, a metric or a skipped batch:")
            lines.append(headed(seen.aside, "Unused"))
        return lines
    if seen.harmless:
        return [
            f"apex trace: {script} made {first.kind}, which reached no gradient, loss or weight.",
            headed(first, "Harmless"),
        ]
    before = counted(seen.steps_before, "optimizer step")
    lines = [
        f"apex trace: {script} {_MADE[first.kind]}, after {before}.",
        headed(first),
        *hit_lines(first, seen.gradients),
    ]
    if first.kind != "scaled" and not seen.gradients and not seen.certain:
        lines.append("  hit    no gradient, loss or weight before the script ended")
    return lines


def _remarks(script: str, seen: Seen, ending: Ending) -> list[str]:
    lines = _ended(ending)
    if seen.healed and seen.first is None:
        state = "Healthy" if seen.steps and seen.healed < seen.passes else "Not settled"
        lines.append(
            f"{state}: {seen.healed} of {counted(seen.passes, 'backward pass', 'es')} "
            "overflowed. This makes a dynamic loss scale back off, and the step is skipped."
        )
    if not seen.operators and not ending.status:
        lines.append(
            "Trace the program that its processes run. If they run a function of this script, as "
            "torch.multiprocessing.spawn does, call that function here, with one process."
        )
    if seen.uninitialized:
        lines.append(
            f"Nothing had written values to {listed(seen.uninitialized)} before the first step, "
            "only torch.empty: initialize it, as by nn.init.normal_ or nn.init.zeros_."
        )
    if seen.first is None and seen.steps:
        lines.append(
            "If the loss stands still, or is higher than in fp32: `apex trace --digits "
            f"{script}` finds operators that lose precision, `--updates` unchanged weights."
        )
    operators = counted(seen.operators, "operator")
    return [*lines, f"Traced {operators} and {counted(seen.steps, 'optimizer step')}."]


def _ended(ending: Ending) -> list[str]:
    """Returns a line on how a script ended; no line if it ended normally."""
    if ending.stopped:
        return ["Then the script was stopped. With --keep-going, it runs to its end."]
    if ending.interrupted:
        return ["The script was interrupted. These are the results up to that point."]
    if ending.error:
        return [f"The script failed: {ending.error}"]
    if ending.status:
        return [f"The script exited with status {ending.status}."]
    return []
