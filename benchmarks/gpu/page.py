"""The page that the last call of a run writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.records import Records

FINDING = "finding"
"""The column of a check that returns a single value, or fails."""


def markdown(records: Records, parts: Sequence[Part]) -> str:
    """Returns the findings as a page: a table for each part."""
    machine = records.results("machine")["machine"]["result"]
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    lines = [f"# {machine['device']}", "", f"Written by `make gpu`. {facts}."]
    for part in parts:
        results = records.results(part.name)
        reason = next(line["over"] for line in records.of(part.name) if line.get("over"))
        lines += ["", f"## {part.name}", "", f"{part.about} {reason.capitalize()}.", ""]
        columns = _columns(results.values())
        lines.append(f"| check | {' | '.join(columns)} |")
        lines.append(f"|---{'|---' * len(columns)}|")
        for check, line in results.items():
            lines.append(f"| {check} | {' | '.join(_cells(line, columns))} |")
    return "\n".join(lines) + "\n"


def _columns(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the names of the values of a part's checks, in order of appearance."""
    names: list[str] = []
    for line in lines:
        for name in _values(line):
            if name not in names:
                names.append(name)
    return names or [FINDING]


def _cells(line: dict[str, Any], columns: Sequence[str]) -> list[str]:
    values = _values(line)
    return [_text(values.get(column, "")) for column in columns]


def _values(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what a check has found, by column."""
    if "error" in line:
        return {FINDING: f"**{line['error']}**"}
    result = line["result"]
    if isinstance(result, dict):
        return result
    return {FINDING: result}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "/").replace("\n", " ")
