"""The page that a run ends with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.records import Records

FINDING = "finding"
"""The column of a check that finds one value, or fails."""


def markdown(records: Records, parts: Sequence[Part]) -> str:
    """Returns the findings as a page: a table for each part."""
    about = records.results("machine")["machine"]["result"]
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    lines = [f"# {about['device']}", "", f"Written by `make gpu`. {facts}."]
    for part in parts:
        results = records.results(part.name)
        over = next(line["over"] for line in records.of(part.name) if line.get("over"))
        lines += ["", f"## {part.name}", "", f"{part.about} {over.capitalize()}.".strip(), ""]
        columns = _columns(results.values())
        lines.append(f"| check | {' | '.join(columns)} |")
        lines.append(f"|---{'|---' * len(columns)}|")
        for check, line in results.items():
            lines.append(f"| {check} | {' | '.join(_cells(line, columns))} |")
    return "\n".join(lines) + "\n"


def _columns(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the names of the values that the checks of a part have found."""
    names: dict[str, None] = {}
    for line in lines:
        found = line.get("result")
        names.update(dict.fromkeys(found if isinstance(found, dict) else [FINDING]))
    return list(names) or [FINDING]


def _cells(line: dict[str, Any], columns: Sequence[str]) -> list[str]:
    found = line.get("result")
    if "error" in line:
        found = f"**{line['error']}**"
    values = found if isinstance(found, dict) else {FINDING: found}
    return [_text(values.get(column, "")) for column in columns]


def _text(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return shown.replace("|", "/").replace("\n", " ")
