"""What causes.ini says of a birth: its cause, the formula behind it, and remedies."""

from __future__ import annotations

import configparser
import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from apex._core import dtypes
from apex.debug.births import Birth
from apex.debug.place import Finding, Place

_MOST_REMEDIES = 3


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
        ways, separator, text = line.partition(" | ")[0].rpartition(" :: ")
        if not separator or way in ways.split(", "):
            found.append(text.format(**names))
    return found


def section_of(cause: str, names: set[str], place: Place, facts: Mapping[str, Any]) -> str:
    """Returns the section of causes.ini that applies: of a formula, or of what divides a cause.

    Args:
        cause: Cause of the finding.
        names: Names of its operator and its autograd node.
        place: Where it is.
        facts: What the conditions of causes.ini ask for, by name.
    """
    for section, row in data().items():
        if cause not in row.get("causes", "").split(", "):
            continue
        if "ops" in row and names.isdisjoint(row["ops"].split()):
            continue
        if not re.search(row.get("line", ""), place.source):
            continue
        if row.get("module", "") not in place.module:
            continue
        if all(_holds(condition, facts) for condition in row.get("if", "").split()):
            return section
    return cause


def _holds(condition: str, facts: Mapping[str, Any]) -> bool:
    """Returns whether a condition holds: NAME, NAME=VALUE|VALUE, NAME<NUMBER or NAME>NUMBER."""
    name, *comparison = re.split("([=<>])", condition)
    fact: Any = facts.get(name)
    if not comparison:
        return bool(fact)
    sign, value = comparison
    if sign == "=":
        return str(fact) in value.split("|")
    number = float(value)
    return bool(fact < number if sign == "<" else fact > number)


def explained(
    section: str, ways: Sequence[str], *, cause: str, dtype: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what a finding says of its cause; the facts are those in the text's braces."""
    why = data()[section].get("why") or data()[cause]["why"]
    return {
        "cause": cause,
        "dtype": dtype,
        "why": why.format_map({**facts, "dtype": dtype}),
        "remedies": tuple(ways[:_MOST_REMEDIES]),
    }


def in_fp32(place: Place, way: str, *, module: str) -> list[str]:
    """Returns how to run a module, or one line, in fp32."""
    line = remedies("in fp32" if place.inside else "a loss in fp32", way)
    return [*module_in_fp32(module, way), *line]


def module_in_fp32(module: str, way: str) -> list[str]:
    """Returns how to keep a module in fp32, if there is one and the way of training has a way."""
    name = module.rpartition(":")[2]
    return remedies("a module in fp32", way, module=name) if name else []


def finding_of(birth: Birth | None) -> Finding | None:
    """Returns a birth's place, cause and remedies; None of none."""
    if birth is None:
        return None
    facts = _facts(birth)
    section = section_of(birth.cause, {birth.name, birth.node}, birth.place, facts)
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
            facts=facts,
        ),
        inputs=birth.inputs,
        pattern=section if "ops" in data()[section] else "",
        heals=birth.heals,
    )


def _remedies_of(birth: Birth, section: str) -> list[str]:
    """Returns the remedies that apply, the best first."""
    ways = remedies(section, birth.way)
    if birth.cause != "range" or not birth.fits_fp32:
        return ways
    also = data()[section].get("also", "fp32 bf16")
    if section == "range":
        ways = []
    if "fp32" in also and not birth.backward and not birth.casts:
        ways += in_fp32(birth.place, birth.way, module=_module_around(birth))
    in_bf16 = remedies("in bf16", birth.way) if "bf16" in also else []
    if "first" in also:
        return in_bf16 + ways
    return ways[: _MOST_REMEDIES - len(in_bf16)] + in_bf16


def _module_around(birth: Birth) -> str:
    """Returns the innermost module that holds a birth and what reads its values.

    A module in fp32 returns 16 bits, which are no place for a result that exceeds their range.
    """
    module = birth.place.module.split(".")
    reader = module if birth.reader_module is None else birth.reader_module.split(".")
    return ".".join(os.path.commonprefix([module, reader]))  # noqa: RUF071 - of names, not paths


def _what(birth: Birth) -> str:
    if birth.number is not None:
        return f"the constant float('{birth.number}') at {birth.place.location}"
    if birth.misuse == "twice":
        return f"{birth.op} {birth.place.where} scales a loss that is scaled already"
    if birth.kind == "scaled":
        return f"{birth.op} {birth.place.where} got gradients times {birth.scale:g}"
    place = f"{birth.place.where}, {birth.place.direction}"
    if birth.cause in ("update", "optimizer state", "skipped step"):
        place = "in an update of the weights"
    largest = f" (largest finite input {birth.largest:.4g})" if birth.inputs else ""
    sign = "-" if birth.negative else ""
    name = dtypes.name(birth.dtype)
    return f"{birth.op} {place}, returned {sign}{birth.kind} in {name}{largest}"


_LARGE = 1e7
"""Numbers beyond it are those of a mask, not of a computation."""


def _facts(birth: Birth) -> dict[str, Any]:
    """Returns what the sections of causes.ini ask of a birth, and what their texts name."""
    info = torch.finfo(birth.dtype)
    is_large = 1e9 < birth.largest < info.max  # the least number is that of a mask
    facts = {
        **vars(birth),
        "heals": birth.heals,
        "backward": birth.backward,
        "fits_fp32": birth.fits_fp32,
        "casts": birth.casts,
        "lowest": birth.lowest,
        "least": birth.lowest == info.min,
        "largest": birth.largest,
        "inside": birth.place.inside,
        "empty": any(0 in values.shape for values in birth.inputs),
        "excess": (birth.true or 0.0) / birth.scale / info.max,
        "operands": len(birth.inputs),
        "grown": birth.grown or (is_large and birth.steps and not birth.fits_fp32),
        "exceeds_fp16": _exceeds_fp16(birth),
        "limit": f"{info.max:g}",
        "true": f"{birth.true:.5g}" if birth.true and math.isfinite(birth.true) else "more",
        "names": birth.names and f" ({birth.names})",
        "divisor": 0.0,
    }
    if birth.inputs:
        facts["reads"] = birth.inputs[0].dtype
    if len(birth.inputs) > 1:
        facts["divisor"] = birth.inputs[1].smallest
    return facts


def _exceeds_fp16(birth: Birth) -> bool:
    """Returns whether a number of the script does, as one of a mask."""
    numbers = [0.0, *birth.numbers]
    if max(numbers) > _LARGE and birth.feeds_softmax:  # that is subtracted
        return True
    return min(numbers) < -65504.0 or birth.lowest < -_LARGE
