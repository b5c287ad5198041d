"""Explains a birth with the texts of causes.ini: its cause, the formula behind it, and remedies."""

from __future__ import annotations

import configparser
import functools
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch

from apex._core import dtypes
from apex.debug.births import Birth
from apex.debug.place import Finding, Place

_MOST_REMEDIES = 3


@functools.cache
def data() -> configparser.ConfigParser:
    """Returns the sections of causes.ini, one for each cause and formula."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", default_section="")
    file = resources.files(__package__).joinpath("causes.ini")  # in a zip file, perhaps
    parser.read_string(file.read_text("utf-8"))
    return parser


def remedies(section: str, way: str, **names: object) -> list[str]:
    """Returns a section's remedies for a way of training; ``names`` fill their braces."""
    found = []
    lines = data()[section].get("remedies", "").split("\n")
    for line in lines[1:]:
        remedy = line.partition(" | ")[0]
        ways, _, text = remedy.rpartition(" :: ")
        if not ways or way in ways.split(", "):
            found.append(text.format(**names))
    return found


def section_of(cause: str, names: set[str], place: Place, facts: Mapping[str, Any]) -> str:
    """Returns the first section of causes.ini that applies to a cause, by default the cause's own.

    Args:
        cause: Cause of the finding.
        names: Names of its operator and its autograd node.
        place: Where it happened.
        facts: The facts that the conditions of causes.ini name.
    """
    for section, row in data().items():
        if cause not in row.get("causes", "").split(", "):
            continue
        if "ops" in row and names.isdisjoint(row["ops"].split()):
            continue
        if not re.search(row.get("line", ""), place.source):
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
    if sign == "<":
        return bool(fact < float(value))
    return bool(fact > float(value))


def explained(
    section: str, ways: list[str], *, cause: str, dtype: str, facts: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Returns the attributes of a finding that explain its cause; ``facts`` fill the braces."""
    row = data()[section]
    if "why" not in row:
        row = data()[cause]
    return {
        "cause": cause,
        "dtype": dtype,
        "why": row["why"].format_map({**facts, "dtype": dtype}),
        "remedies": tuple(ways[:_MOST_REMEDIES]),
    }


def in_fp32(place: Place, way: str, *, module: str) -> list[str]:
    """Returns the remedies that run a module, or one line, in fp32."""
    section = "in fp32" if place.inside else "a loss in fp32"
    return module_in_fp32(module, way) + remedies(section, way)


def module_in_fp32(module: str, way: str) -> list[str]:
    """Returns the remedies that keep a module in fp32; none for ``""``."""
    name = module.rpartition(":")[2]
    if not name:
        return []
    return remedies("a module in fp32", way, module=name)


def finding_of(birth: Birth | None) -> Finding | None:
    """Returns a birth's place, cause and remedies; None if there is no birth."""
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
    if birth.cause == "kernel" and birth.dtype in dtypes.LOW_PRECISION:
        return in_fp32(birth.place, birth.way, module=birth.place.module) + ways
    if birth.cause != "range" or not birth.fits_fp32:
        return ways
    if section == "range":
        ways = []
    also = data()[section].get("also", "fp32 bf16")
    if "fp32" in also and not birth.backward and not birth.casts:
        ways += in_fp32(birth.place, birth.way, module=_module_around(birth))
    in_bf16 = []
    if "bf16" in also:
        in_bf16 = remedies("in bf16", birth.way)
    if "first" in also:
        return in_bf16 + ways
    return ways[: _MOST_REMEDIES - len(in_bf16)] + in_bf16


def _module_around(birth: Birth) -> str:
    """Returns the innermost module that contains a birth and the operator that reads its values.

    A module in fp32 returns 16 bits, whose range the values exceed.
    """
    module = birth.place.module.split(".")
    reader = module
    if birth.reader_module is not None:
        reader = birth.reader_module.split(".")
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
    value = birth.kind
    if birth.negative:
        value = f"-{value}"
    text = f"{birth.op} {place}, returned {value} in {dtypes.name(birth.dtype)}"
    if birth.inputs:
        text += f" (largest finite input {birth.largest:.4g})"
    return text


_LARGE = 1e7
"""Larger numbers belong to a mask, not to a computation."""


def _facts(birth: Birth) -> dict[str, Any]:
    """Returns the facts that the conditions of causes.ini name, and those in its braces."""
    info = torch.finfo(birth.dtype)
    true = birth.true or 0.0
    shown = ""  # beyond float64, or unknown
    if 0.0 < true < math.inf:
        shown = f", {true:.5g},"
    names = birth.names
    if names:
        names = f" ({names})"
    facts = {
        **vars(birth),
        "heals": birth.heals,
        "backward": birth.backward,
        "fits_fp32": birth.fits_fp32,
        "casts": birth.casts,
        "lowest": birth.lowest,
        "least": birth.lowest == info.min,
        "inside": birth.place.inside,
        "parametrized": "parametrizations" in birth.place.module,
        "empty": any(0 in values.shape for values in birth.inputs),
        "excess": true / birth.scale / info.max,
        "operands": len(birth.inputs),
        "exceeds_dtype": _exceeds_dtype(birth),
        "limit": f"{info.max:g}",
        "true": shown,
        "names": names,
        "divisor": 0.0,
        "last_number": [math.inf, *birth.numbers][-1],
    }
    if birth.inputs:
        facts["reads"] = birth.inputs[0].dtype
    if len(birth.inputs) > 1:
        facts["divisor"] = birth.inputs[1].smallest
    return facts


def _exceeds_dtype(birth: Birth) -> bool:
    """Returns whether the script gave the operator a number beyond its range, as for a mask."""
    limit = torch.finfo(birth.dtype).max
    numbers = [0.0, *birth.numbers]
    if max(numbers) > _LARGE and birth.feeds_softmax:  # a mask that is subtracted
        return True
    if min(numbers) < -limit:
        return True
    return birth.lowest < -max(_LARGE, limit)
