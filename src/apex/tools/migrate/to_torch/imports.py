"""The imports: apex.amp goes, torch comes."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from apex.tools.migrate.script import Script, dotted
from apex.tools.migrate.to_torch.edits import Edits
from apex.tools.migrate.to_torch.flow import AMP
from apex.tools.migrate.to_torch.places import statement_of, suite_of
from apex.tools.migrate.to_torch.reasons import Findings


def remove_imports(findings: Findings, edits: Edits) -> None:
    """Takes away the imports that only amp needed, and imports torch where it is not yet."""
    script = findings.script
    for node in script.nodes:
        if isinstance(node, cst.Import | cst.ImportFrom):
            _remove(findings, edits, node)
    _remove_empty_blocks(script, edits)
    if "torch" not in set(_module_level_imports(script)):
        edits.before.setdefault(_first_import(script), []).insert(0, "import torch")


def _remove(findings: Findings, edits: Edits, node: cst.Import | cst.ImportFrom) -> None:
    if isinstance(node.names, cst.ImportStar):
        return
    script = findings.script
    gone = [alias for alias in node.names if _is_only_for_amp(script, node, alias)]
    if not gone:
        return
    statement = statement_of(script, node)
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        findings.note(node, "this import is needed no more.")
        return
    owner = next(script.parents(suite_of(script, statement)), None)
    if isinstance(owner, cst.Try) and not _is_only_for_import(owner):
        findings.note(node, "this import is needed no more; what depends on it was left.")
        return
    edits.aliases.update(gone)
    if len(gone) == len(node.names):
        edits.statements[statement] = []


def _is_only_for_amp(
    script: Script, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias
) -> bool:
    name = dotted(alias.name) or ""
    if isinstance(node, cst.ImportFrom):
        if node.relative:
            return False
        return f"{dotted(node.module)}.{name}.".startswith(f"{AMP}.")
    if f"{name}.".startswith(f"{AMP}.") and alias.asname is not None:
        return True
    others = (full for _, full in script.references if full.startswith("apex."))
    is_apex = name == "apex" or f"{name}.".startswith(f"{AMP}.")
    return is_apex and not any(not full.startswith(f"{AMP}.") for full in others)


def _is_only_for_import(owner: cst.Try) -> bool:
    """Returns whether a ``try`` holds one statement, and says what to install if that fails."""
    bodies = [handler.body.body for handler in owner.handlers]
    only_raises = all(
        len(body) == 1
        and isinstance(body[0], cst.SimpleStatementLine)
        and isinstance(body[0].body[0], cst.Raise)
        for body in bodies
    )
    bare = owner.orelse is None and owner.finalbody is None
    return only_raises and bare and len(owner.body.body) == 1


def _remove_empty_blocks(script: Script, edits: Edits) -> None:
    """Takes away each ``try`` and ``if`` that the edits leave without a statement."""
    for node in reversed(script.nodes):
        if isinstance(node, cst.Try | cst.If) and node not in edits.statements:
            body = node.body.body
            empty = bool(body) and all(edits.statements.get(each) == [] for each in body)
            removable = isinstance(node, cst.Try) or node.orelse is None
            is_elif = isinstance(next(script.parents(node)), cst.If)
            if empty and removable and not is_elif:
                edits.statements[node] = []


def _module_level_imports(script: Script) -> Iterator[str]:
    """Yields the names that imports bind before anything else runs."""
    for statement in script.module.body:
        for part in getattr(statement, "body", ()) if _is_line(statement) else ():
            if isinstance(part, cst.Import):
                for alias in part.names:
                    name = dotted(alias.name) or ""
                    yield name.partition(".")[0] if alias.asname is None else ""


def _first_import(script: Script) -> cst.CSTNode:
    """Returns the statement that an import may be put before."""
    for statement in script.module.body:
        part = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        is_text = isinstance(part, cst.Expr) and isinstance(
            part.value, cst.SimpleString | cst.ConcatenatedString
        )
        is_future = isinstance(part, cst.ImportFrom) and dotted(part.module) == "__future__"
        if not is_text and not is_future:
            return statement
    raise ValueError("The script has no statements.")


def _is_line(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine)
