"""The page of a run's results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu import training
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import Records

FINDING = "finding"
"""The column of a check that returns a single value, or fails."""
Results = Mapping[str, dict[str, Any]]


def markdown(records: Records) -> str:
    """Returns the findings as a page: a summary, and a table for each part that has some."""
    machine = records.machine()
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    lines = [f"# {machine['device']}", "", f"Written by `make gpu`. {facts}."]
    ratios = summary(records)
    if ratios:
        lines += ["", "## Times relative to autocast", "", ratios.rstrip()]
    for part in PARTS.values():
        results = records.results(part.name)
        if not results:
            continue
        reason = records.reason(part.name) or "not all checks have ended"
        lines += ["", f"## {part.name}", "", f"{part.about} {reason.capitalize()}.", ""]
        rows = {check: _values(line) for check, line in results.items()}
        columns = _columns(rows.values())
        lines.append(f"| check | {' | '.join(columns)} |")
        lines.append(f"|---{'|---' * len(columns)}|")
        for check, values in rows.items():
            cells = [_text(values.get(column, "")) for column in columns]
            lines.append(f"| {check} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(records: Records) -> str:
    """Returns a table of times relative to autocast: with the host, and as a graph.

    It is empty if no part that trains has run.
    """
    levels = sorted(training.BASELINES)
    lines = []
    for name in training.NETWORKS:
        for part in (name, f"{name}, compiled"):
            results = records.results(part)
            cells = [_relative(results, level) for level in levels]
            if any(cells):
                lines.append(f"| {part} | {' | '.join(cells)} |")
    if not lines:
        return ""
    head = f"| device time / autocast, as a graph | {' | '.join(levels)} |"
    return "\n".join([head, f"|---{'|---' * len(levels)}|", *lines]) + "\n"


def _relative(results: Results, level: str) -> str:
    """Returns a level's times relative to its native counterpart's."""
    native = _values(results.get(training.BASELINES[level], {}))
    values = _values(results.get(level, {}))
    columns = [name for name in (training.EAGER, training.GRAPH) if name in native.keys() & values]
    return ", ".join(f"{values[name] / native[name]:.2f}" for name in columns)


def _columns(rows: Iterable[dict[str, Any]]) -> Sequence[str]:
    """Returns the names of the values of a part's checks, in order of appearance."""
    names: dict[str, None] = {}
    for values in rows:
        names.update(dict.fromkeys(values))
    return list(names)


def _values(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what a check has found, by column."""
    if "error" in line:
        return {FINDING: f"**{line['error']}**"}
    result = line.get("result", {})
    if isinstance(result, dict):
        return result
    return {FINDING: result}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "/").replace("\n", " ")
