"""What became of the scripts, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apex.tools.migrate.report import folded
from apex.tools.migrate.to_torch.conversion import Conversion
from apex.tools.migrate.to_torch.reasons import Remark


def conversion_text(conversion: Conversion) -> str:
    """Returns the notes on what changed, the reasons for what stays, and the counts."""
    parts = [_paragraph(each.path, "rewritten", each.notes) for each in conversion.changed]
    parts += [_paragraph(each.path, "left as it is", each.refusals) for each in conversion.left]
    parts += [f"{path}: {reason}" for path, reason in conversion.unread]
    counts = f"{len(conversion.changed)} rewritten, {len(conversion.left)} left as they are."
    return "\n\n".join([*parts, counts if parts else "No script uses apex.amp."])


def to_json(conversion: Conversion) -> dict[str, Any]:
    """Returns the diffs with their notes, and what stays with the reasons."""
    return {
        "changed": [
            {"file": str(each.path), "diff": each.diff, "notes": _remarks(each.notes)}
            for each in conversion.changed
        ],
        "left": [
            {"file": str(each.path), "reasons": _remarks(each.refusals)} for each in conversion.left
        ],
        "not_read": [{"file": str(path), "reason": reason} for path, reason in conversion.unread],
    }


def _paragraph(path: Path, outcome: str, remarks: Iterable[Remark]) -> str:
    lines = [folded(f"line {remark.line}: {remark.text}", "  ") for remark in remarks]
    return "\n".join([f"{path}: {outcome}", *lines])


def _remarks(remarks: Iterable[Remark]) -> list[dict[str, Any]]:
    return [{"line": remark.line, "text": remark.text} for remark in remarks]
