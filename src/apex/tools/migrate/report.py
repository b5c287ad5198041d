"""The uses of apex at a path, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from apex.tools.migrate.migration import Migration, ScriptUses
from apex.tools.migrate.uses import Use
from apex.tools.migrate.verdicts import Kind, Verdict
from apex.tools.wrapping import wrapped

_INDENT = " " * 17

MOST_LINES = 10
"""Lines named for each use; the JSON has all."""


def migration_text(migration: Migration) -> str:
    """Returns a paragraph per file, remarks that several share, the unread files, the counts."""
    scripts = [script for script in migration.scripts if script.uses]
    shared = _shared_remarks(scripts)
    parts = ["\n".join([str(s.path), *_rows(s.uses, shared)]) for s in scripts]
    parts += [
        "\n".join(wrapped(text, "    ", first=f"[{at}] ") for at, text in enumerate(shared, 1)),
        "\n".join(f"{path}: {reason}" for path, reason in migration.unread),
        _summary(migration),
    ]
    return "\n\n".join(filter(None, parts))


def to_json(migration: Migration) -> dict[str, Any]:
    """Returns every use with its verdict, the unread files, and the counts by verdict."""
    return {
        "uses": [
            {
                "file": str(script.path),
                "line": use.line,
                "column": use.column,
                "name": use.name,
                "verdict": verdict.kind.value,
                "remedy": verdict.text,
            }
            for script in migration.scripts
            for use, verdict in script.uses
        ],
        "not_read": [{"file": str(path), "reason": reason} for path, reason in migration.unread],
        "files": migration.files,
        "counts": {kind.value: count for kind, count in _counts(migration).items()},
    }


def _shared_remarks(scripts: Sequence[ScriptUses]) -> list[str]:
    """Returns the remarks that concern several files, in order."""
    found = Counter(
        text
        for script in scripts
        for text in dict.fromkeys(verdict.text for _, verdict in script.uses)
        if text
    )
    return [text for text, files in found.items() if files > 1]


def _rows(uses: Sequence[tuple[Use, Verdict]], shared: Sequence[str]) -> Iterable[str]:
    """Yields the names with the lines of their uses; those with the same remark stand together."""
    groups: dict[tuple[str, str], dict[str, list[int]]] = {}
    for use, verdict in uses:
        # Without a remark, each name is a group of its own.
        group = groups.setdefault((verdict.kind.value, verdict.text or f"\0{use.name}"), {})
        group.setdefault(use.name, []).append(use.line)
    for (kind, text), names in groups.items():
        remark = "" if text.startswith("\0") else text
        seen = f" [{shared.index(remark) + 1}]" if remark in shared else ""
        for at, (name, lines) in enumerate(names.items()):
            yield f"  {kind if not at else '':<13}  {name}  ({_lines(lines)}){seen}"
        if remark and not seen:
            yield wrapped(remark, _INDENT)


def _lines(lines: Sequence[int]) -> str:
    """Returns the first of the lines, and how many more there are."""
    distinct = list(dict.fromkeys(lines))
    more = len(distinct) - MOST_LINES
    shown = ", ".join(map(str, distinct[:MOST_LINES]))
    return f"line {shown}" + (f" and {more:,} more" if more > 0 else "")


def _summary(migration: Migration) -> str:
    counts = _counts(migration)
    files = f"{migration.files} file{'s' if migration.files != 1 else ''}"
    if not sum(counts.values()):
        return f"{files}: no use of apex."
    return (
        f"{files}: {counts[Kind.WORKS]} uses work unchanged, {counts[Kind.NOTE]} with a note, "
        f"{counts[Kind.NOT_SUPPORTED]} unsupported."
    )


def _counts(migration: Migration) -> dict[Kind, int]:
    found = Counter(verdict.kind for script in migration.scripts for _, verdict in script.uses)
    return {kind: found[kind] for kind in Kind}
