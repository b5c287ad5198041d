"""The result of ``explain``: records, per-module and total sums, and output formats."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apex.debug.findings import Finding, findings_of
from apex.debug.records import CAST, LOW, GradientRow, OpRow, RoundTrip, WeightCasts, share
from apex.debug.rendering import formatting
from apex.debug.rendering.files import render, save
from apex.debug.rendering.text import text


@dataclass(frozen=True)
class ModuleRow:
    """The sums over a module and its submodules.

    Attributes:
        name: Qualified name; ``""`` for the model.
        kind: Class name.
        dtype: Dtype in which its forward computed, ``"mixed"``, or ``""`` if it computed nothing.
        time_share: Share of all measured time.
        flops: Floating-point operations.
        low_precision_flops: Floating-point operations in 16 bits.
        casts: Number of casts.
        cast_bytes: Bytes that these casts read and wrote.
        headroom: Least headroom of a forward result (powers of two); None without results.
        nonfinite: Number of results that were inf or NaN.
    """

    name: str
    kind: str
    dtype: str
    time_share: float
    flops: int
    low_precision_flops: int
    casts: int
    cast_bytes: int
    headroom: float | None
    nonfinite: int


@dataclass(frozen=True)
class Totals:
    """Totals of the run. Shares are between 0 and 1, or None if the whole is 0.

    Attributes:
        seconds: Time in all operators.
        flops: Floating-point operations.
        low_precision_flops: Floating-point operations in 16 bits.
        low_precision_share: ``low_precision_flops / flops``.
        casts: Number of casts.
        cast_bytes: Bytes that these casts read and wrote.
        round_trips: Number of round trips of casts, each counted once: redundant ones, and those
            through an operator.
        wasted_casts: Number of redundant round-trip casts.
        wasted_bytes: Bytes that these casts read and wrote.
        largest: Largest finite absolute result of the forward operator with the least headroom.
        largest_dtype: Its dtype.
        largest_module: Its module.
        headroom: Powers of two from ``largest`` to the dtype's largest number.
        underflow_share: Share of values cast to 16 bits that became zero or subnormal.
        overflow_share: Share of values cast to 16 bits that became inf.
        nonfinite_share: Share of all floating-point results that were inf or NaN.
        gradient_underflow_share: Share of parameter gradients that are non-zero but would be zero
            or subnormal in fp16.
        gradient_overflow_share: Share of parameter gradients beyond fp16's range.
        gradient_zero_share: Share of parameter gradients that are exactly zero.
    """

    seconds: float
    flops: int
    low_precision_flops: int
    low_precision_share: float | None
    casts: int
    cast_bytes: int
    round_trips: int
    wasted_casts: int
    wasted_bytes: int
    largest: float | None
    largest_dtype: str
    largest_module: str
    headroom: float | None
    underflow_share: float | None
    overflow_share: float | None
    nonfinite_share: float | None
    gradient_underflow_share: float | None
    gradient_overflow_share: float | None
    gradient_zero_share: float | None


@dataclass(frozen=True)
class Explanation:
    """The dtypes of each operator of a model, the reasons for them, and their cost.

    ``print`` shows tables; ``save`` writes a file in the format given by its suffix.

    Attributes:
        model: Class name of the model.
        level: What set the dtypes, such as ``"O4"`` or ``"torch.autocast"``.
        loss_scale: Multiplier on the loss in the backward pass.
        ops: One record per operator, module, direction and set of dtypes, in order of first use.
        round_trips: Round trips of casts, redundant or through an operator.
        gradients: One record per parameter; empty without a backward pass.
        kinds: Class name by module name, parents first.
        notes: Remarks on how the numbers were measured.
        weight_casts: Casts of parameters, by dtype.
    """

    model: str
    level: str
    loss_scale: float
    ops: tuple[OpRow, ...]
    round_trips: tuple[RoundTrip, ...]
    gradients: tuple[GradientRow, ...]
    kinds: Mapping[str, str]
    notes: tuple[str, ...]
    weight_casts: tuple[WeightCasts, ...] = ()

    @functools.cached_property
    def seconds(self) -> float:
        """Time in all operators and casts."""
        return sum(row.seconds for row in self.ops)

    @functools.cached_property
    def totals(self) -> Totals:
        """Totals of the run."""
        down = [cast for row in self.ops for cast in row.casts if cast.target in LOW]
        sums, near = _sums(self.ops), _least_headroom(self.ops)
        return Totals(
            **sums,
            seconds=self.seconds,
            low_precision_share=share(sums["low_precision_flops"], sums["flops"]),
            round_trips=sum(trip.count for trip in self.round_trips),
            wasted_casts=sum(trip.casts for trip in self.round_trips if not trip.op),
            wasted_bytes=sum(trip.bytes for trip in self.round_trips if not trip.op),
            largest=near.largest if near else None,
            largest_dtype=near.dtype_out if near else "",
            largest_module=near.module if near else "",
            headroom=near.headroom if near else None,
            underflow_share=_share_of(down, "to_zero", "to_subnormal"),
            overflow_share=_share_of(down, "to_inf"),
            nonfinite_share=_share_of(self.ops, "nonfinite"),
            gradient_underflow_share=_share_of(self.gradients, "to_zero", "to_subnormal"),
            gradient_overflow_share=_share_of(self.gradients, "to_inf"),
            gradient_zero_share=_share_of(self.gradients, "zeros"),
        )

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What could be saved, the most time first."""
        return findings_of(self.round_trips, self.weight_casts, self.seconds)

    @functools.cached_property
    def modules(self) -> tuple[ModuleRow, ...]:
        """One record per module of the model, parents first."""
        return tuple(self._module(name) for name in self.kinds)

    def _module(self, name: str) -> ModuleRow:
        rows = self._inside(name)
        near = _least_headroom(rows)
        forward = [row for row in rows if row.direction == "forward"]
        dtypes = {row.computed_in for row in forward or rows if row.op != CAST} - {""}
        return ModuleRow(
            **_sums(rows),
            name=name,
            kind=self.kinds[name],
            dtype=dtypes.pop() if len(dtypes) == 1 else "mixed" if dtypes else "",
            time_share=share(sum(row.seconds for row in rows), self.seconds) or 0.0,
            headroom=near.headroom if near else None,
            nonfinite=sum(row.nonfinite for row in rows),
        )

    def _inside(self, name: str) -> list[OpRow]:
        """Returns the records of a module and its submodules."""
        return [row for row in self.ops if row.inside and within(row.module, name)]

    def time_share(self, row: OpRow) -> float:
        """Returns the share of all measured time that an operator and its casts took."""
        return share(row.seconds, self.seconds) or 0.0

    # -- formats -------------------------------------------------------------------------------

    def to_text(self, *, rows: int | None = 40, colour: bool = False) -> str:
        """Returns tables for a terminal.

        Args:
            rows: Largest number of operators to show, those that took the most time; None for all.
            colour: Whether to colour dtypes with ANSI sequences.
        """
        return text(self, rows=rows, colour=colour)

    def to_markdown(self) -> str:
        """Returns Markdown tables."""
        names = {"explanation": self, "formatting": formatting}
        return render("apex.debug.rendering", "explanation.md.jinja", **names)

    def to_html(self) -> str:
        """Returns a self-contained page that shows the model's tree coloured by dtype."""
        outside = [row for row in self.ops if not row.inside]
        found = {_tone(row.computed_in) for row in self.ops}

        def shares(rows: Iterable[OpRow]) -> list[tuple[str, float]]:
            """Returns the share of all time by dtype, for a bar."""
            sums: defaultdict[str, float] = defaultdict(float)
            for row in rows:
                sums[_tone(row.computed_in)] += self.time_share(row)
            return sorted(sums.items())

        return render(
            "apex.debug.rendering",
            "explanation.html.jinja",
            explanation=self,
            formatting=formatting,
            tone=_tone,
            cast_op=CAST,
            legend=[name for name in _DTYPES if name in found],
            parts=formatting.parts(self.modules),
            inside=self._inside,
            outside=outside,
            outside_casts=sum(cast.count for row in outside for cast in row.casts),
            shares=shares,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all data in plain containers."""
        own = asdict(self)
        for shown, row in zip(own["ops"], self.ops, strict=True):
            shown.update(time_share=self.time_share(row), headroom=row.headroom)
        return {
            **own,
            "findings": [asdict(finding) for finding in self.findings],
            "totals": asdict(self.totals),
            "modules": [asdict(module) for module in self.modules],
        }

    def to_json(self) -> str:
        """Returns all data as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Writes a file in the format given by its suffix: ``.html``, ``.md``, ``.json``, ``.txt``.

        Raises:
            ValueError: If the suffix is none of these; nothing is written.
        """
        formats = {
            ".html": self.to_html,
            ".md": self.to_markdown,
            ".json": self.to_json,
            ".txt": self.to_text,
        }
        save(path, "an explanation", formats)

    def __str__(self) -> str:
        return self.to_text()


_DTYPES = ("fp16", "bf16", "fp32", "fp64")


def _tone(dtype: str) -> str:
    """Returns the CSS class that colours a dtype."""
    return formatting.short(dtype) if dtype else "none"


def _sums(rows: Sequence[OpRow]) -> dict[str, int]:
    """Returns what the totals and the record of a module have in common."""
    casts = [cast for row in rows for cast in row.casts]
    return {
        "flops": sum(row.flops for row in rows),
        "low_precision_flops": sum(row.flops for row in rows if row.computed_in in LOW),
        "casts": sum(cast.count for cast in casts),
        "cast_bytes": sum(cast.bytes for cast in casts),
    }


def _least_headroom(rows: Iterable[OpRow]) -> OpRow | None:
    """Returns the forward record with the least headroom."""
    known = [row for row in rows if row.direction == "forward" and row.headroom is not None]
    return min(known, key=lambda row: row.headroom or 0.0, default=None)


def within(module: str, parent: str) -> bool:
    """Returns whether a module is another, or inside it; all are inside the model, ``""``."""
    return not parent or module == parent or module.startswith(parent + ".")


def _share_of(rows: Iterable[Any], *names: str) -> float | None:
    given = list(rows)
    part = sum(getattr(row, name) for row in given for name in names)
    return share(part, sum(row.values for row in given))
