"""Numbers, dtypes and findings as text, the same in every output format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from apex.debug.explanation import Explanation, ModuleRow, Totals
    from apex.debug.findings import Finding
    from apex.debug.records import OpRow

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_NEAR = 2.0
"""Headroom (powers of two) below which a row is marked."""


class Line(NamedTuple):
    """One of the totals: its name, its value, a remark, and whether it deserves attention."""

    name: str
    value: str
    remark: str
    is_alarm: bool = False


def is_near(headroom: float | None) -> bool:
    """Returns whether a result came close to its dtype's limit."""
    return headroom is not None and headroom < _NEAR


def short(dtype: str) -> str:
    """Returns a dtype's short name, such as ``"bf16"``, or a dash."""
    return _SHORT.get(dtype, dtype) or "—"


def percent(share: float | None) -> str:
    """Returns a share as a percentage, or a dash for None."""
    if share is None:
        return "—"
    value = 100.0 * share
    if value and abs(value) < 0.1:
        return "<0.1 %"
    if 99.95 <= value < 100.0:
        return ">99.9 %"
    return f"{value:.0f} %" if value in (0.0, 100.0) else f"{value:.1f} %"


def size(count: int) -> str:
    """Returns bytes in a suitable unit."""
    return f"{count} B" if count < 1024 else _scaled(count, 1024.0, ("KiB", "MiB", "GiB", "TiB"))


def amount(count: int) -> str:
    """Returns a count, with an SI suffix from 1000 on."""
    return str(count) if count < 1000 else _scaled(count, 1000.0, ("k", "M", "G", "T", "P"))


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Returns, for instance, ``"1 pass"`` or ``"2 passes"``; ``plural`` is the ending."""
    return f"{count} {noun}{plural * (count != 1)}"


def number(value: float) -> str:
    """Returns a number with three significant digits; integers in full."""
    return f"{value:.0f}" if value >= 1 and value == int(value) else f"{value:.3g}"


def bits(headroom: float | None) -> str:
    """Returns headroom in whole powers of two, or a dash for None."""
    return "—" if headroom is None else str(int(headroom))


def place(module: str, inside: bool = True) -> str:
    """Returns where something ran: a module, the model itself, or outside the model."""
    return module or ("(model)" if inside else "(outside)")


def parts(modules: Iterable[ModuleRow]) -> dict[str, list[ModuleRow]]:
    """Returns the modules directly inside each, by its name; a shared one has a single name."""
    found: dict[str, list[ModuleRow]] = {module.name: [] for module in modules}
    for module in modules:
        if module.name:
            found[module.name.rpartition(".")[0]].append(module)
    return found


def listed(names: Sequence[str], most: int, what: str = "") -> str:
    """Returns the first ``most`` names, and how many more of ``what`` there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more{what}" if more > 0 else "")


def aligned(table: Sequence[Sequence[str]], left: Sequence[bool]) -> list[list[str]]:
    """Returns the rows of a table with each cell padded, in ``left`` columns at its right."""
    columns = []
    for column, is_left in zip(zip(*table, strict=True), left, strict=True):
        width, pad = max(map(len, column)), str.ljust if is_left else str.rjust
        columns.append([pad(cell, width) for cell in column])
    return [list(row) for row in zip(*columns, strict=True)]


def types(row: OpRow) -> str:
    """Returns the dtypes in and out of an operator."""
    return f"{' + '.join(map(short, row.dtypes_in)) or '—'} → {short(row.dtype_out)}"


def casts(row: OpRow) -> str:
    """Returns an operator's casts, such as ``"3 fp32→bf16, 384 B"``; empty if it has none."""
    made = [f"{cast.count} {short(cast.source)}→{short(cast.target)}" for cast in row.casts]
    return f"{', '.join(made)}, {size(sum(cast.bytes for cast in row.casts))}" if made else ""


def lines(explanation: Explanation) -> Iterator[Line]:
    """Yields the totals."""
    totals = explanation.totals
    yield Line(
        "FLOPs in low precision",
        percent(totals.low_precision_share),
        f"of {amount(totals.flops)} floating-point operations",
    )
    yield Line("Casts", amount(totals.casts), f"{size(totals.cast_bytes)} read and written")
    yield Line(
        "Round-trip casts",
        amount(totals.round_trips),
        _round_trips(explanation),
        bool(totals.wasted_casts),
    )
    yield Line("Least headroom", bits(totals.headroom), _nearest(totals), is_near(totals.headroom))
    yield Line(
        "Underflow in 16-bit casts",
        percent(totals.underflow_share),
        f"to zero or subnormal; overflow to inf: {percent(totals.overflow_share)}",
        bool(totals.overflow_share),
    )
    yield Line(
        "Non-finite results",
        percent(totals.nonfinite_share),
        "inf or NaN, of all results",
        bool(totals.nonfinite_share),
    )
    if explanation.gradients:
        yield Line(
            "Gradients below fp16's range",
            percent(totals.gradient_underflow_share),
            f"zero or subnormal in fp16 at loss scale {number(explanation.loss_scale)};"
            f" overflow: {percent(totals.gradient_overflow_share)};"
            f" exactly zero already: {percent(totals.gradient_zero_share)}",
        )


def findings(explanation: Explanation) -> list[str]:
    """Returns what could be saved, one sentence each, the most time first."""
    return [_sentence(finding) for finding in explanation.findings]


def _sentence(finding: Finding) -> str:
    trips = finding.count < finding.casts
    what = f"{amount(finding.count)} round trip{'s' * (finding.count != 1)}, " if trips else ""
    each = size(round(finding.bytes / finding.casts))
    where = listed([place(module) for module in finding.modules], 2)
    return (
        f"{finding.title}: {what}{amount(finding.casts)} x {each} of casts, "
        f"{percent(finding.share)} of the step, in {where}; {finding.remedy}."
    )


def _round_trips(explanation: Explanation) -> str:
    trips = sorted(explanation.round_trips, key=lambda trip: -trip.bytes)
    if not trips:
        return "no cast is undone by a later one"
    first = trips[0]
    path = " → ".join(map(short, first.path))
    through = f" through {first.op.removeprefix('aten.')}" if first.op else ""
    more = f" and {len(trips) - 1} more" if len(trips) > 1 else ""
    total = size(sum(trip.bytes for trip in trips))
    return f"{total}; {path}{through} in {place(first.module)} ({first.direction}){more}"


def _nearest(totals: Totals) -> str:
    if totals.largest is None:
        return "no forward result to measure"
    powers = "power" if bits(totals.headroom) == "1" else "powers"
    left = f"{powers} of two above {totals.largest:.3g}"
    module = f"module {totals.largest_module}" if totals.largest_module else "the model itself"
    return f"{left} ({short(totals.largest_dtype)} in {module})"


def _scaled(count: float, base: float, units: tuple[str, ...]) -> str:
    for unit in units:
        count /= base
        if count < base or unit == units[-1]:
            break
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
