"""The uses of apex at a path, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from apex.tools.migrate.migration import Migration, ScriptUses
from apex.tools.migrate.uses import Use
from apex.tools.migrate.verdicts import Kind, Verdict
from apex.tools.wrapping import wrapped

_INDENT = " " * 17


def migration_text(migration: Migration) -> str:
    """Returns a paragraph per file, then the unread files, then the counts."""
    parts = [_script_text(script) for script in migration.scripts if script.uses]
    parts += [f"{path}: {reason}" for path, reason in migration.unread]
    return "\n\n".join([*parts, _summary(migration)])


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


def _script_text(script: ScriptUses) -> str:
    return "\n".join([str(script.path), *_rows(script.uses)])


def _rows(uses: Iterable[tuple[Use, Verdict]]) -> Iterable[str]:
    """Yields a row for each name and verdict, followed by the lines of its uses."""

    def by_name(pair: tuple[Use, Verdict]) -> tuple[str, str]:
        return pair[0].name, pair[1].text

    grouped = [list(group) for _, group in groupby(sorted(uses, key=by_name), key=by_name)]
    for group in sorted(grouped, key=lambda pairs: pairs[0][0].line):
        use, verdict = group[0]
        lines = ", ".join(map(str, dict.fromkeys(use.line for use, _ in group)))
        yield f"  {verdict.kind.value:<13}  {use.name}  (line {lines})"
        if verdict.text:
            yield wrapped(verdict.text, _INDENT)


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
