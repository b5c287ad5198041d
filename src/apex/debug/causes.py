"""What causes.ini says of a birth: its cause, the formula behind it, and remedies."""

from __future__ import annotations

import configparser
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from apex._core import dtypes
from apex.debug.births import Birth
from apex.debug.place import Finding, Place

_MOST_REMEDIES = 3
_WAYS = {"plain", "autocast", "O0", "O1", "O2", "O3", "O4", "O5"}


@functools.cache
def data() -> configparser.ConfigParser:
    """Returns what causes.ini says of each cause and formula."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", default_section="")
    parser.read_string(Path(__file__).with_name("causes.ini").read_text("utf-8"))
    return parser


def remedies(section: str, way: str, **names: object) -> list[str]:
    """Returns a section's remedies for a way of training, with the names in their braces."""
    found = []
    for line in data()[section].get("remedies", "").split("\n")[1:]:
        text = line.partition(" | ")[0]
        ways, _, rest = text.partition(": ")
        if _WAYS.issuperset(ways.split(", ")):
            if way not in ways.split(", "):
                continue
            text = rest
        found.append(text.format(**names))
    return found


def explained(
    section: str, ways: Sequence[str], *, cause: str, dtype: str, **names: object
) -> dict[str, Any]:
    """Returns what a finding says of its cause; the names are those in the text's braces."""
    why = data()[section].get("why") or data()[cause]["why"]
    return {
        "cause": cause,
        "dtype": dtype,
        "why": why.format(dtype=dtype, **names),
        "remedies": tuple(ways[:_MOST_REMEDIES]),
    }


def in_fp32(place: Place, way: str, device: str = "cpu") -> list[str]:
    """Returns how to run a module, or one line, in fp32."""
    line = remedies("in fp32" if place.inside else "a loss in fp32", way, device=device)
    return [*module_in_fp32(place, way), *line]


def module_in_fp32(place: Place, way: str) -> list[str]:
    """Returns how to keep a module in fp32, if there is one and the way of training has a way."""
    module = place.module.rpartition(":")[2]
    return remedies("a module in fp32", way, module=module) if module else []


def finding_of(birth: Birth | None) -> Finding | None:
    """Returns a birth's place, cause and remedies; None of none."""
    if birth is None:
        return None
    section = _section(birth)
    notes = []
    for place, largest in birth.next.items():
        notes.append(("next", f"once that is clamped, {largest:.3g} here\n{place.shown}"))
    return Finding(
        **vars(birth.place),
        op=birth.op,
        kind=birth.kind,
        what=_what(birth),
        **explained(
            section,
            _remedies_of(birth, section),
            cause=birth.cause,
            dtype=dtypes.name(birth.dtype),
            limit=f"{torch.finfo(birth.dtype).max:g}",
            true=f"{birth.true:.5g}" if birth.true and math.isfinite(birth.true) else "more",
            scale=birth.scale,
            eps=birth.eps,
            names=birth.names and f" ({birth.names})",
        ),
        inputs=birth.inputs,
        pattern=section if "ops" in data()[section] else "",
        heals=birth.heals,
        notes=tuple(notes),
    )


def _remedies_of(birth: Birth, section: str) -> list[str]:
    """Returns the remedies that apply, the best first."""
    ways = remedies(section, birth.way)
    if birth.cause != "range" or not birth.fits_fp32 or "alone" in data()[section]:
        return ways
    if not _FLAGS["backward"](birth) and not _FLAGS["cast"](birth):
        line = in_fp32(birth.place, birth.way, birth.device)
        ways = line if section == "range" else ways + line
    in_bf16 = remedies("in bf16", birth.way)
    return ways[: _MOST_REMEDIES - len(in_bf16)] + in_bf16


def _what(birth: Birth) -> str:
    if birth.number is not None:
        return f"the constant float('{birth.number}') at {birth.place.location}"
    if birth.kind == "scaled":
        return f"{birth.op} {birth.place.where} got gradients times {birth.scale:g}"
    place = f"{birth.place.where}, {birth.place.direction}"
    if birth.cause in ("update", "optimizer state", "skipped step"):
        place = "in an update of the weights"
    largest = f" (largest finite input {birth.largest:.4g})" if birth.inputs else ""
    sign = "-" if birth.negative else ""
    name = dtypes.name(birth.dtype)
    return f"{birth.op} {place}, returned {sign}{birth.kind} in {name}{largest}"


def _section(birth: Birth) -> str:
    """Returns the section of causes.ini that applies: of a formula, or of what divides a cause."""
    name = birth.node if birth.cause == "derivative" else birth.name
    for section, row in data().items():
        if birth.cause not in row.get("causes", "").split(", "):
            continue
        if "ops" in row and name not in row["ops"].split():
            continue
        if row.get("line", "") not in birth.place.source:
            continue
        if all(_FLAGS[flag](birth) for flag in row.get("if", "").split()):
            return section
    return birth.cause


_INFINITE_SLOPES = {"Sqrt", "Rsqrt", "Pow", "Log", "Div", "Reciprocal", "Acos", "Asin"}
_LARGE = 1e7
"""Numbers beyond it are those of a mask, not of a computation."""


def _is_masked(birth: Birth) -> bool:
    """Returns whether a mask's 0 met an infinite derivative."""
    met = birth.cause == "derivative" and birth.kind == "nan"
    return birth.masked_again or (met and birth.node in _INFINITE_SLOPES)


def _has_grown(birth: Birth) -> bool:
    # Not a mask of torch.finfo(dtype).min.
    grown = 1e9 < birth.largest < torch.finfo(birth.dtype).max
    return birth.grown or (grown and not birth.fits_fp32)


def _loses_eps(birth: Birth) -> bool:
    in_fp16 = birth.dtype is torch.float16
    return in_fp16 and birth.eps is not None and birth.eps <= 2.0**-25  # rounds to 0


def _is_below_fp16(birth: Birth) -> bool:
    if birth.dtype is not torch.float16 or birth.backward:
        return False
    largest = max(birth.numbers, default=0.0)
    if largest > _LARGE and birth.feeds_softmax:  # that is subtracted
        return True
    return min(birth.numbers, default=0.0) < -65504.0 or birth.lowest < -_LARGE


_FLAGS: dict[str, Callable[[Birth], bool]] = {
    "masked": _is_masked,
    "number": lambda birth: birth.number is not None,
    "infinite": lambda birth: birth.number is not None and math.isinf(birth.number),
    "unwritten": lambda birth: birth.unwritten,
    "no-eps": _loses_eps,
    "nan": lambda birth: birth.kind == "nan",
    "unhealed": lambda birth: not birth.heals,
    "dynamic": lambda birth: birth.dynamic,
    "then-sums": lambda birth: birth.reader in ("sum", "div"),
    "then-adds": lambda birth: birth.reader == "add",
    "step": lambda birth: birth.op == "step",
    "reading": lambda birth: birth.masked,
    "beyond-fp16": _is_below_fp16,
    "growth": _has_grown,
    "backward": lambda birth: birth.fits_fp32 and birth.backward,
    "cast": lambda birth: birth.fits_fp32 and birth.name in ("to_copy", "copy"),
    "in-fp16": lambda birth: birth.dtype is torch.float16,
    "fp16": lambda birth: birth.reads("float16"),
    "bf16": lambda birth: birth.reads("bfloat16"),
    "below-0": lambda birth: birth.lowest < 0.0,
    "least": lambda birth: birth.lowest == torch.finfo(birth.dtype).min,
    "tiny-divisor": lambda birth: len(birth.inputs) > 1 and 0 < birth.inputs[1].smallest < 1e-3,
    "scores": lambda birth: birth.feeds_softmax and not birth.weighs,
}
"""What the sections of causes.ini ask of a birth."""
