"""Numbers, dtypes and findings in words; the same in every format."""

from __future__ import annotations

from collections.abc import Iterator

from apex.debug.explanation import Explanation, Totals
from apex.debug.records import OpRow

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def short(dtype: str) -> str:
    """Returns a dtype's short name, such as ``"bf16"``; a dash for none."""
    return SHORT.get(dtype, dtype) or "—"


def percent(share: float | None) -> str:
    """Returns a share as a percentage; a dash for None."""
    if share is None:
        return "—"
    value = 100.0 * share
    if value and abs(value) < 0.1:
        return "<0.1 %"
    if 99.95 <= value < 100.0:
        return ">99.9 %"
    return f"{value:.0f} %" if value in (0.0, 100.0) else f"{value:.1f} %"


def size(count: int) -> str:
    """Returns bytes in a unit that fits."""
    return f"{count} B" if count < 1024 else _scaled(count, 1024.0, ("KiB", "MiB", "GiB", "TiB"))


def amount(count: int) -> str:
    """Returns a count with a suffix for thousands, millions, ..."""
    return str(count) if count < 1000 else _scaled(count, 1000.0, ("k", "M", "G", "T", "P"))


def number(value: float) -> str:
    """Returns a number in three digits, large powers of two whole."""
    return f"{value:.0f}" if value >= 1 and value == int(value) else f"{value:.3g}"


def bits(headroom: float | None) -> str:
    """Returns headroom in whole powers of two; a dash for None."""
    return "—" if headroom is None else str(int(headroom))


def place(module: str, inside: bool = True) -> str:
    """Returns where something ran: a module, the model itself, or outside of it."""
    return module or ("(model)" if inside else "(outside)")


def types(row: OpRow) -> str:
    """Returns the dtypes in and out of an operator."""
    return f"{' + '.join(map(short, row.dtypes_in)) or '—'} → {short(row.dtype_out)}"


def casts(row: OpRow) -> str:
    """Returns the casts made for an operator, such as ``"3 fp32→bf16, 384 B"``; or nothing."""
    made = [f"{cast.count} {short(cast.source)}→{short(cast.target)}" for cast in row.casts]
    return f"{', '.join(made)}, {size(sum(cast.bytes for cast in row.casts))}" if made else ""


def findings(explanation: Explanation) -> Iterator[tuple[str, str, str]]:
    """Yields the totals: a name, its value, and what to know about it."""
    totals = explanation.totals
    yield (
        "FLOPs in low precision",
        percent(totals.low_precision_share),
        f"of {amount(totals.flops)} floating-point operations",
    )
    yield "Casts", amount(totals.casts), f"{size(totals.cast_bytes)} read and written"
    yield "Casts there and back", amount(totals.wasted_casts), _round_trips(explanation)
    yield "Nearest to its limit", bits(totals.headroom), _nearest(totals)
    yield (
        "Lost in casts to 16 bits",
        percent(totals.underflow_share),
        f"to zero or subnormal; {percent(totals.overflow_share)} to inf",
    )
    yield "Results not finite", percent(totals.nonfinite_share), "inf or NaN, of all results"
    if explanation.gradients:
        yield (
            "Gradients under fp16",
            percent(totals.gradient_underflow_share),
            f"would go to zero or subnormal in fp16 at loss scale {number(explanation.loss_scale)}"
            f"; {percent(totals.gradient_overflow_share)} beyond its range,"
            f" {percent(totals.gradient_zero_share)} zero already",
        )


def _round_trips(explanation: Explanation) -> str:
    trips = sorted(explanation.round_trips, key=lambda trip: -trip.bytes)
    if not trips:
        return "none is undone by the next"
    first = trips[0]
    path = " → ".join(map(short, first.path))
    more = f" and {len(trips) - 1} more" if len(trips) > 1 else ""
    total = size(explanation.totals.wasted_bytes)
    return f"{total}; {path} in {place(first.module)} ({first.direction}){more}"


def _nearest(totals: Totals) -> str:
    if totals.largest is None:
        return "no forward result to look at"
    powers = "power" if bits(totals.headroom) == "1" else "powers"
    left = f"{powers} of two left above {totals.largest:.3g}"
    module = f"module {totals.largest_module}" if totals.largest_module else "the model itself"
    return f"{left} ({short(totals.largest_dtype)} in {module})"


def _scaled(count: float, base: float, units: tuple[str, ...]) -> str:
    for unit in units:
        count /= base
        if count < base or unit == units[-1]:
            break
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
