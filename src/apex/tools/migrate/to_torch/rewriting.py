"""One script, from amp to ``torch.amp``: read, judged, and changed if all of it is understood."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from apex.tools.migrate.script import Script
from apex.tools.migrate.to_torch.casts import put_under_autocast
from apex.tools.migrate.to_torch.context import Context
from apex.tools.migrate.to_torch.edits import Edits, edited
from apex.tools.migrate.to_torch.expressions import replace_expressions
from apex.tools.migrate.to_torch.flow import calls_of, initialize_of, scale_loss_of
from apex.tools.migrate.to_torch.imports import remove_imports
from apex.tools.migrate.to_torch.reasons import Findings, Remark
from apex.tools.migrate.to_torch.roles import Role, Roles
from apex.tools.migrate.to_torch.statements import replace_statements


@dataclass(frozen=True)
class Rewritten:
    """What became of a script.

    Attributes:
        after: Its new source; None if it stays as it is.
        refusals: Why it stays.
        notes: What to know of the new one.
    """

    after: str | None
    refusals: tuple[Remark, ...]
    notes: tuple[Remark, ...]


def rewritten(script: Script, *, level: str | None) -> Rewritten:
    """Returns the script in terms of ``torch.amp``, or why it stays.

    Args:
        script: One that uses amp.
        level: The level to assume where the script computes it.
    """
    findings = Findings(script)
    edits = _edits(findings, level)
    refusals = tuple(sorted(findings.refusals))
    if refusals or edits is None:
        return Rewritten(None, refusals, ())
    after = edited(script.module, edits).code
    ast.parse(after)  # raises rather than hand on what is no Python
    return Rewritten(after, (), tuple(sorted(findings.notes)))


def _edits(findings: Findings, level: str | None) -> Edits | None:
    context = _context(findings, level)
    if context is None:
        return None
    put_under_autocast(context)
    replace_statements(context)
    replace_expressions(context)
    remove_imports(findings, context.edits)
    return context.edits


def _context(findings: Findings, level: str | None) -> Context | None:
    calls = calls_of(findings)
    found = initialize_of(findings, calls, level)
    scaled = scale_loss_of(findings, calls) if len(calls["initialize"]) == 1 else None
    if found is None or scaled is None:
        return None
    prepared, precision = found
    roles = Roles(findings.script, prepared.statement)
    roles.give(prepared.statement, prepared.targets[0], Role.MODEL)
    roles.give(prepared.statement, prepared.targets[1], Role.OPTIMIZER)
    if roles.of(scaled.optimizer) is not Role.OPTIMIZER:
        findings.refuse(scaled.block, "this optimizer is not seen to come from amp.initialize.")
        return None
    return Context(findings, calls, prepared, precision, scaled, roles)
