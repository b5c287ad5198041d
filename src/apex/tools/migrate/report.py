"""The uses of apex at a path, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from apex.debug.rendering.formatting import counted
from apex.tools.migrate.migration import Migration
from apex.tools.migrate.uses import Use
from apex.tools.migrate.verdicts import Kind, Verdict
from apex.tools.wrapping import wrapped

_INDENT = " " * 17

MOST_LINES = 10
"""Lines named for each use; the JSON has all."""


def migration_text(migration: Migration) -> str:
    """Returns a paragraph per file, remarks that several share, the unread files, the counts."""
    shared = _shared_remarks(migration)
    files = groupby(migration.uses, itemgetter(0))
    parts = ["\n".join([str(path), *_rows((u[1:] for u in own), shared)]) for path, own in files]
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
                "file": str(path),
                "line": use.line,
                "column": use.column,
                "name": use.name,
                "verdict": verdict.kind.value,
                "remedy": verdict.text,
            }
            for path, use, verdict in migration.uses
        ],
        "not_read": [{"file": str(path), "reason": reason} for path, reason in migration.unread],
        "files": migration.files,
        "counts": {kind.value: count for kind, count in _counts(migration).items()},
    }


def _shared_remarks(migration: Migration) -> list[str]:
    """Returns the remarks that concern several files, in order."""
    found = dict.fromkeys((path, verdict.text) for path, _, verdict in migration.uses)
    files = Counter(text for _, text in found if text)
    return [text for text, count in files.items() if count > 1]


def _rows(uses: Iterable[tuple[Use, Verdict]], shared: Sequence[str]) -> Iterable[str]:
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
    files = counted(migration.files, "file")
    if not sum(counts.values()):
        return f"{files}: no use of apex."
    return (
        f"{files}: {counts[Kind.WORKS]} uses work unchanged, {counts[Kind.NOTE]} with a note, "
        f"{counts[Kind.NOT_SUPPORTED]} unsupported."
    )


def _counts(migration: Migration) -> dict[Kind, int]:
    found = Counter(verdict.kind for _, _, verdict in migration.uses)
    return {kind: found[kind] for kind in Kind}
