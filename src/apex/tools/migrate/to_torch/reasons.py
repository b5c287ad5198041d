"""Why a script stays as it is, and what to know of one that was changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from apex.tools.migrate.script import Script


@dataclass(frozen=True, order=True)
class Remark:
    """A line (from 1) and a sentence on it."""

    line: int
    text: str


@dataclass
class Findings:
    """What is found while a script is read.

    Attributes:
        script: The script.
        refusals: Reasons to leave it.
        notes: What differs after the change.
    """

    script: Script
    refusals: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)

    def refuse(self, node: cst.CSTNode, text: str) -> None:
        """Adds a reason to leave the script."""
        self._add(self.refusals, node, text)

    def note(self, node: cst.CSTNode, text: str) -> None:
        """Adds what to know of the changed script."""
        self._add(self.notes, node, text)

    def _add(self, remarks: list[Remark], node: cst.CSTNode, text: str) -> None:
        remark = Remark(self.script.line(node), text)
        if remark not in remarks:
            remarks.append(remark)
