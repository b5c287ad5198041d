"""Numbers, dtypes and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


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


def place(module: str, inside: bool = True) -> str:
    """Returns where something ran: a module, the model itself, or outside the model."""
    return module or ("(model)" if inside else "(outside)")


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


def _scaled(count: float, base: float, units: tuple[str, ...]) -> str:
    for unit in units:
        count /= base
        if count < base or unit == units[-1]:
            break
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
