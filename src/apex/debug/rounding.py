"""Traces every operator, forward and backward, and names those that lose digits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from apex.debug.arguments import check_scaler
from apex.debug.module_tracker import ModuleTracker
from apex.debug.rendering import formatting
from apex.debug.rendering.files import json_types, render, save
from apex.debug.rounding_mode import RoundingMode
from apex.debug.rounding_records import RoundingLog, RoundingRow, Skipped
from apex.debug.tracing_old import Trace


def trace_rounding(*models: nn.Module, scaler: Any = None) -> RoundingTrace:
    """Returns a context that finds the operators at which low precision loses digits.

    Enter it around one or more whole iterations, forward and backward; it may include
    ``optimizer.step``, which is not judged. Every value that fp16 or bf16 touched has an fp32
    shadow, which the same operators compute from the values that the iteration began with. An
    operator stands out where its result is much further from its shadow than the errors of its
    inputs, the dtype's eps and the operator's shape explain: by its own rounding, by cancellation,
    or at the end of a long chain of small steps.

    Works with and without ``amp.initialize``: under ``torch.autocast``, on 16-bit models. Random
    operators draw once, and decisions (the sign in a relu's gradient, the index of a maximum) are
    those of the run, on both sides. The run computes the same numbers as without the trace.
    Operators without a verdict, such as one whose kernel does not run in fp32, are listed in
    ``skipped``.

    Each operator runs once more in fp32, and host syncs follow it: an iteration takes ten
    to twenty times as long, and additional memory for its activations in fp32. Models under
    ``torch.compile`` run uncompiled inside the context, as compiled code is opaque.

    Args:
        models: One or more models, as passed to ``amp.initialize`` or since wrapped by
            ``torch.compile`` or DistributedDataParallel. They provide the names of modules.
        scaler: The ``torch.amp.GradScaler`` of a plain loop, as the other tools take it. Errors are
            relative, so its scale changes none of them.

    Returns:
        A :class:`RoundingTrace` context; its ``worst`` is the operator at which digits were first
        lost, or None.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> class Shift(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x + 1000) - 1000
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), Shift()).bfloat16()
        >>> with amp.debug.trace_rounding(model) as trace:
        ...     model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
        >>> trace.worst.module, trace.worst.op, trace.worst.direction, trace.worst.kind
        ('1', 'aten.sub', 'forward', 'cancellation')
        >>> trace.worst.error > 10 * trace.worst.tolerance > 10 * trace.worst.inherited
        True
    """
    check_scaler("trace_rounding", scaler)
    return RoundingTrace(*models)


class RoundingTrace(Trace):
    """The result of :func:`trace_rounding`. ``print`` shows it, ``save`` writes a file."""

    _NAME = "trace_rounding"

    def __init__(self, *models: nn.Module) -> None:
        super().__init__(*models)
        self._log = RoundingLog()

    def _new_mode(self) -> RoundingMode:
        return RoundingMode(ModuleTracker(*self._models), self._log)

    @property
    def rows(self) -> tuple[RoundingRow, ...]:
        """One record per module, operator, direction and dtype, most suspicious first."""
        return tuple(sorted(self._log.rows.values(), key=lambda row: -row.suspicion))

    @property
    def worst(self) -> RoundingRow | None:
        """The operator at which digits were first lost beyond tolerance; None if at none."""
        return next(iter(self.lost), None)

    @property
    def lost(self) -> tuple[RoundingRow, ...]:
        """The rows beyond tolerance in order of time; later ones may only pass on the damage."""
        return tuple(self._log.rows[place] for place in self._log.lost)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The operators without a verdict: from there on, their results count as exact."""
        return tuple(self._log.skipped)

    @property
    def operators(self) -> int:
        """Number of operator calls that were compared with fp32."""
        return self._log.operators

    # -- formats ----------------------------------------------------------------------------------

    def to_text(self, *, rows: int | None = 10) -> str:
        """Returns the verdict and a table of the most suspicious operators.

        Args:
            rows: Largest number of operators to show; None for all.
        """
        lines, worst = [self._verdict], self.worst
        if worst is not None:
            lines += [f"  at     {worst.location}"] if worst.location else []
            lines += [f"  cause  {worst.cause}", f"  remedy {worst.remedy}"]
        shown = [_cells(row) for row in self.rows[:rows]]
        if shown:
            table = formatting.aligned([_HEAD, *shown], [True] * len(_HEAD))
            lines += ["", *("  ".join(line).rstrip() for line in table)]
        return "\n".join([*lines, *(f"skipped: {line}" for line in self._skips)])

    def to_html(self) -> str:
        """Returns a self-contained page, which loads nothing and runs no script."""
        return render(
            "apex.debug.rendering",
            "rounding.html.jinja",
            verdict=self._verdict,
            worst=self.worst,
            head=_HEAD,
            rows=[(_cells(row), row.suspicion, bool(row.kind)) for row in self.rows],
            skips=self._skips,
        )

    @property
    def _verdict(self) -> str:
        """What was found, in one line."""
        worst = self.worst
        if worst is None:
            rest = f"; {len(self.skipped)} without a verdict" if self.skipped else ""
            return (
                f"No digits lost: {self.operators} operators traced, all within their "
                f"tolerance{rest}."
            )
        return (
            f"Digits first lost: {worst.op} {worst.place}, {worst.direction}, in {worst.dtype}: "
            f"error {worst.error:.2g}, explained {worst.tolerance:.2g}, "
            f"inherited {worst.inherited:.2g}"
        )

    @property
    def _skips(self) -> list[str]:
        """A line for each operator without a verdict."""
        return [f"{e.op} in {e.module or '(no module)'}: {e.reason}" for e in self.skipped]

    def to_dict(self) -> dict[str, Any]:
        """Returns all data in plain containers; an infinite number as None."""
        found = {
            "worst": None if self.worst is None else asdict(self.worst),
            "rows": list(map(asdict, self.rows)),
            "skipped": list(map(asdict, self.skipped)),
            "operators": self.operators,
        }
        return dict(json_types(found))

    def to_json(self) -> str:
        """Returns all data as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Writes a file in the format given by its suffix: ``.html``, ``.json``, ``.txt``.

        Raises:
            ValueError: If the suffix is none of these; nothing is written.
        """
        formats = {".html": self.to_html, ".json": self.to_json, ".txt": self.to_text}
        save(path, "a trace", formats)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Returns the page, for notebooks."""
        return self.to_html()


_HEAD = ("module", "operator", "pass", "dtype", "calls", "error", "tolerance", "inherited")
"""The columns of both tables."""


def _cells(row: RoundingRow) -> tuple[str, ...]:
    """Returns one line of a table."""
    return (
        formatting.place(row.module, row.inside),
        row.op.removeprefix("aten."),
        row.direction,
        formatting.short(row.dtype),
        formatting.amount(row.calls),
        *(f"{value:.2g}" for value in (row.error, row.tolerance, row.inherited)),
    )
